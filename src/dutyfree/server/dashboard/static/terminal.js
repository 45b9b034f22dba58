// A terminal in the page: shows a Screen, and sends what is typed over a TerminalChannel.

import { TerminalChannel } from "./channel.js";
import { h, setText } from "./dom.js";
import { BOLD, DIM, HIDDEN, INVERSE, ITALIC, STRUCK, Screen, UNDERLINE } from "./screen.js";

const ROW = 17; // pixels, as in the style sheet
const PALETTE = ["#4a525c", "#f0716b", "#7cc78d", "#e0b45e", "#6cabec", "#c793e0", "#5cc2c7", "#d8dde4", "#7d8794", "#ff948e", "#a0e0ae", "#f5d08a", "#94c8ff", "#deb3f2", "#8adfe3", "#ffffff"];
const INK = "#d8dde4";
const PAPER = "#11151a";

const KEYS = {
  Enter: "\r", Backspace: "\x7f", Tab: "\t", Escape: "\x1b", Delete: "\x1b[3~", Insert: "\x1b[2~", PageUp: "\x1b[5~", PageDown: "\x1b[6~",
  F1: "\x1bOP", F2: "\x1bOQ", F3: "\x1bOR", F4: "\x1bOS", F5: "\x1b[15~", F6: "\x1b[17~", F7: "\x1b[18~", F8: "\x1b[19~", F9: "\x1b[20~", F10: "\x1b[21~", F11: "\x1b[23~", F12: "\x1b[24~",
};
const CURSOR_KEYS = { ArrowUp: "A", ArrowDown: "B", ArrowRight: "C", ArrowLeft: "D", Home: "H", End: "F" };

export class TerminalPanel {
  constructor(sandbox, token) {
    this.sandbox = sandbox;
    this.token = token;
    this.status = h("p", { class: "note", role: "status" }, "opening");
    this.again = h("button", { type: "button", hidden: true, onclick: () => this.open() }, "Open again");
    this.output = h("pre", { role: "log", "aria-label": "Terminal output", "aria-live": "off" });
    this.view = h("div", { class: "view", tabindex: "-1" }, this.output);
    this.input = h("textarea", { "aria-label": "Terminal input. Ctrl+] leaves the terminal.", autocapitalize: "off", autocomplete: "off", autocorrect: "off", spellcheck: "false", rows: "1" });
    const keys = [["Esc", "\x1b"], ["Tab", "\t"], ["Ctrl+C", "\x03"], ["Ctrl+D", "\x04"], ["↑", "\x1b[A"], ["↓", "\x1b[B"]];
    this.keys = h("div", { class: "keys", role: "group", "aria-label": "Keys" }, ...keys.map(([name, text]) => h("button", { type: "button", onclick: () => { this.type(text); this.input.focus(); } }, name)));
    this.box = h("div", { class: "terminal" }, this.view, this.input);
    this.leave = h("p", { class: "note" }, "Ctrl+] leaves the terminal");
    this.node = h("div", {}, this.box, this.keys, h("div", { class: "tools" }, this.status, this.again, this.leave));
    this.listen();
    this.resized = new ResizeObserver(() => this.fit());
  }

  open() {
    this.channel?.close();
    this.again.hidden = true;
    const size = this.measure();
    this.lineNodes = [];
    this.historyShown = 0;
    this.output.replaceChildren();
    this.screen = new Screen(size.rows, size.columns, { reply: (text) => this.type(text), title: (text) => setText(this.leave, `Ctrl+] leaves the terminal. ${text}`) });
    this.channel = new TerminalChannel(this.sandbox, size, this.token, {
      data: (bytes) => { this.screen.write(bytes); this.plan(); },
      opened: () => setText(this.status, "connected"),
      ended: (message) => { setText(this.status, message); this.again.hidden = false; },
    });
    this.resized.observe(this.view);
    this.input.focus({ preventScroll: true });
    this.plan();
  }

  close() {
    this.resized.disconnect();
    this.channel?.close();
  }

  measure() {
    const probe = h("span", {}, "0".repeat(50));
    const line = h("div", {}, probe);
    this.output.append(line);
    const width = probe.getBoundingClientRect().width / 50 || 8;
    line.remove();
    return { rows: Math.max(4, Math.floor(this.view.clientHeight / ROW)), columns: Math.max(20, Math.min(400, Math.floor((this.view.clientWidth - 2) / width))) };
  }

  fit() {
    const size = this.measure();
    if (!this.screen || (size.rows === this.screen.rows && size.columns === this.screen.columns)) return;
    this.screen.resize(size.rows, size.columns);
    this.channel.resize(size);
    this.plan();
  }

  type(text) {
    if (text) this.channel?.type(text);
  }

  // --- The keyboard -------------------------------------------------------------------------------------

  listen() {
    this.box.addEventListener("mouseup", () => {
      if (getSelection().isCollapsed) this.input.focus({ preventScroll: true });
    });
    this.input.addEventListener("keydown", (event) => this.press(event));
    this.input.addEventListener("input", (event) => {
      if (event.isComposing) return;
      this.type(this.input.value.replaceAll("\n", "\r"));
      this.input.value = "";
    });
    this.input.addEventListener("compositionend", () => {
      this.type(this.input.value);
      this.input.value = "";
    });
    this.input.addEventListener("paste", (event) => {
      event.preventDefault();
      // What is pasted must not be able to end the brackets, and so to press Enter.
      const text = event.clipboardData.getData("text").replaceAll("\x1b", "").replaceAll("\r\n", "\r").replaceAll("\n", "\r");
      this.type(this.screen.bracketedPaste ? `\x1b[200~${text}\x1b[201~` : text);
    });
    this.input.addEventListener("focus", () => this.plan());
    this.input.addEventListener("blur", () => this.plan());
  }

  press(event) {
    if (event.isComposing || event.metaKey) return;
    if (event.ctrlKey && event.key === "]") {
      event.preventDefault();
      this.node.closest("section").querySelector("h2").setAttribute("tabindex", "-1");
      this.node.closest("section").querySelector("h2").focus();
      return;
    }
    const text = this.sequence(event);
    if (text === null) return;
    event.preventDefault();
    this.view.scrollTop = this.view.scrollHeight;
    this.type(event.altKey ? `\x1b${text}` : text);
  }

  // What a key sends; null if the browser should have it.
  sequence(event) {
    const { key, ctrlKey, altKey, shiftKey } = event;
    if (ctrlKey && shiftKey && /^[cv]$/i.test(key)) return null; // copy and paste
    if (ctrlKey && !altKey) {
      if (key === "c" && !getSelection().isCollapsed) return null;
      if (key === "v") return null;
      if (/^[a-z]$/i.test(key)) return String.fromCharCode(key.toLowerCase().charCodeAt(0) - 96);
      const codes = { " ": "\0", "@": "\0", "[": "\x1b", "\\": "\x1c", "^": "\x1e", _: "\x1f", "/": "\x1f" };
      if (key in codes) return codes[key];
    }
    if (key === "Tab" && shiftKey) return "\x1b[Z";
    if (key in CURSOR_KEYS) {
      const modifier = 1 + (shiftKey ? 1 : 0) + (ctrlKey ? 4 : 0);
      if (modifier > 1) return `\x1b[1;${modifier}${CURSOR_KEYS[key]}`;
      return `\x1b${this.screen.applicationKeys ? "O" : "["}${CURSOR_KEYS[key]}`;
    }
    if (key in KEYS) return KEYS[key];
    return altKey && !ctrlKey && key.length === 1 ? key : null; // other characters come as input
  }

  // --- The screen ---------------------------------------------------------------------------------------

  plan() {
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => {
      this.planned = false;
      this.draw();
    });
  }

  draw() {
    const { screen } = this;
    if (!screen) return;
    const atEnd = this.view.scrollTop + this.view.clientHeight >= this.view.scrollHeight - 2 * ROW;
    this.drawHistory();
    while (this.lineNodes.length < screen.rows) this.lineNodes.push(this.output.appendChild(h("div")));
    while (this.lineNodes.length > screen.rows) this.lineNodes.pop().remove();
    if (this.cursorRow !== undefined) screen.dirty.add(this.cursorRow);
    screen.dirty.add(screen.row);
    for (const row of screen.dirty) if (this.lineNodes[row]) this.drawLine(this.lineNodes[row], screen.lines[row], screen.cursorVisible && row === screen.row ? screen.column : -1);
    this.cursorRow = screen.row;
    screen.dirty.clear();
    if (atEnd) this.view.scrollTop = this.view.scrollHeight;
  }

  // Lines that scrolled off the screen since the last time go above it.
  drawHistory() {
    const { screen } = this;
    const total = screen.dropped + screen.history.length;
    const missing = Math.min(total - this.historyShown, screen.history.length);
    this.historyShown = total;
    const before = this.lineNodes[0] ?? null;
    for (const line of screen.history.slice(screen.history.length - Math.max(0, missing))) {
      const node = h("div");
      this.drawLine(node, line, -1);
      this.output.insertBefore(node, before);
    }
    while (this.output.childElementCount - this.lineNodes.length > screen.history.length) this.output.firstElementChild.remove();
  }

  drawLine(node, line, cursor) {
    const parts = [];
    let run = "";
    let pen = null;
    const flush = () => {
      if (run) parts.push(styled(run, pen));
      run = "";
    };
    let end = line.cells.length;
    while (end > cursor + 1 && end > 0 && line.cells[end - 1].text === " " && line.cells[end - 1].pen.background === null && !line.cells[end - 1].pen.flags) end -= 1;
    for (let column = 0; column < end; column += 1) {
      const cell = line.cells[column];
      if (column === cursor) {
        flush();
        const shown = styled(cell.text || " ", cell.pen);
        const node = typeof shown === "string" ? h("span", {}, shown) : shown;
        node.classList.add("cursor");
        parts.push(node);
        continue;
      }
      if (cell.pen !== pen) flush();
      pen = cell.pen;
      run += cell.text;
    }
    flush();
    node.replaceChildren(...parts);
  }
}

function styled(text, pen) {
  if (pen.foreground === null && pen.background === null && pen.flags === 0) return text;
  const node = h("span", {}, text);
  let [ink, paper] = [colour(pen.foreground, pen.flags & BOLD), colour(pen.background, 0)];
  if (pen.flags & INVERSE) [ink, paper] = [paper ?? PAPER, ink ?? INK];
  if (ink) node.style.color = ink;
  if (paper) node.style.backgroundColor = paper;
  if (pen.flags & BOLD) node.style.fontWeight = "600";
  if (pen.flags & DIM) node.style.opacity = "0.7";
  if (pen.flags & ITALIC) node.style.fontStyle = "italic";
  if (pen.flags & HIDDEN) node.style.visibility = "hidden";
  const lines = [pen.flags & UNDERLINE ? "underline" : "", pen.flags & STRUCK ? "line-through" : ""].join(" ").trim();
  if (lines) node.style.textDecoration = lines;
  return node;
}

function colour(value, bold) {
  if (value === null || typeof value === "string") return value;
  if (value < 16) return PALETTE[value < 8 && bold ? value + 8 : value];
  if (value >= 232) return `rgb(${[0, 0, 0].fill(8 + (value - 232) * 10).join(" ")})`;
  const step = (level) => (level ? 55 + level * 40 : 0);
  const index = value - 16;
  return `rgb(${step(Math.floor(index / 36))} ${step(Math.floor(index / 6) % 6)} ${step(index % 6)})`;
}
