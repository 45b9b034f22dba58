// The screen of a terminal: characters and what escape sequences do to them, as xterm does. No DOM in here.

const HISTORY = 2000; // lines above the screen
const LONGEST = 4096; // characters of an escape sequence, of which a program may never send the end

export const BOLD = 1;
export const DIM = 2;
export const ITALIC = 4;
export const UNDERLINE = 8;
export const INVERSE = 16;
export const HIDDEN = 32;
export const STRUCK = 64;

const LINES = { j: "┘", k: "┐", l: "┌", m: "└", n: "┼", q: "─", t: "├", u: "┤", v: "┴", w: "┬", x: "│", a: "▒", "`": "◆", f: "°", g: "±", o: "⎺", s: "⎽", "~": "·", y: "≤", z: "≥", "{": "π", "|": "≠", "}": "£" };
const WIDE = /[\u1100-\u115f\u2e80-\u303e\u3041-\u33ff\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6\u{1f300}-\u{1f64f}\u{1f680}-\u{1f6ff}\u{1f900}-\u{1f9ff}\u{20000}-\u{3fffd}]/u;
const COMBINING = /^[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u200b-\u200d\u20d0-\u20ff\ufe00-\ufe0f\ufe20-\ufe2f]/;

const PLAIN = Object.freeze({ foreground: null, background: null, flags: 0 });

class Line {
  constructor(columns, pen = PLAIN) {
    this.cells = Array.from({ length: columns }, () => ({ text: " ", pen }));
    this.wrapped = false;
  }
}

export class Screen {
  // `reply` sends to the program, `title` gets the title that it sets.
  constructor(rows, columns, { reply = () => {}, title = () => {} } = {}) {
    this.rows = rows;
    this.columns = columns;
    this.reply = reply;
    this.onTitle = title;
    this.decoder = new TextDecoder();
    this.reset();
  }

  reset() {
    this.lines = Array.from({ length: this.rows }, () => new Line(this.columns));
    this.history = [];
    this.dropped = 0;
    this.other = null; // the main screen, while a program shows the alternate one
    this.row = 0;
    this.column = 0;
    this.pen = PLAIN;
    this.saved = { row: 0, column: 0, pen: PLAIN };
    this.top = 0;
    this.bottom = this.rows - 1;
    this.wraps = true;
    this.pending = false; // the last column is full, and the next character begins a line
    this.cursorVisible = true;
    this.applicationKeys = false;
    this.bracketedPaste = false;
    this.inserting = false;
    this.originMode = false;
    this.drawing = false;
    this.last = " ";
    this.state = "ground";
    this.sequence = "";
    this.dirty = new Set();
    this.touchAll();
  }

  touchAll() {
    for (let row = 0; row < this.rows; row += 1) this.dirty.add(row);
  }

  resize(rows, columns) {
    const fit = (lines, isMain) => {
      for (const line of lines) {
        while (line.cells.length < columns) line.cells.push({ text: " ", pen: PLAIN });
        line.cells.length = columns;
      }
      while (lines.length > rows) {
        if (this.row < lines.length - 1 && lines.at(-1).cells.every((cell) => cell.text === " ")) lines.pop();
        else {
          const gone = lines.shift();
          if (isMain) this.remember(gone);
          this.row = Math.max(0, this.row - 1);
        }
      }
      while (lines.length < rows) lines.push(new Line(columns));
    };
    fit(this.lines, this.other === null);
    if (this.other) fit(this.other.lines, true);
    this.rows = rows;
    this.columns = columns;
    this.top = 0;
    this.bottom = rows - 1;
    this.row = Math.min(this.row, rows - 1);
    this.column = Math.min(this.column, columns - 1);
    this.pending = false;
    this.dirty.clear();
    this.touchAll();
  }

  write(bytes) {
    for (const character of this.decoder.decode(bytes, { stream: true })) this.take(character);
  }

  take(character) {
    const code = character.codePointAt(0);
    if (code === 0x18 || code === 0x1a) this.state = "ground"; // cancels a sequence
    else if (code === 0x1b && this.state !== "string") this.begin("escape");
    else this[this.state](character, code);
  }

  begin(state) {
    this.state = state;
    this.sequence = "";
  }

  // --- States of the parser -----------------------------------------------------------------------------

  ground(character, code) {
    if (code >= 0x20 && code !== 0x7f) this.print(character);
    else this.control(code);
  }

  escape(character, code) {
    if (code < 0x20) this.control(code);
    else if (character === "[") this.begin("csi");
    else if (character === "]") this.begin("string");
    else if ("PX^_".includes(character)) this.begin("ignored");
    else if ("()*+-./#% ".includes(character)) this.begin(character === "(" ? "charset" : "skip");
    else {
      this.state = "ground";
      this.simple(character);
    }
  }

  charset(character) {
    this.drawing = character === "0";
    this.state = "ground";
  }

  skip() {
    this.state = "ground";
  }

  csi(character, code) {
    if (code < 0x20) this.control(code);
    else if (code >= 0x40 && code <= 0x7e) {
      this.state = "ground";
      this.perform(character, this.sequence);
    } else if (this.sequence.length < LONGEST) this.sequence += character;
    else this.state = "ground";
  }

  // An operating system command ends with BEL or ESC \.
  string(character, code) {
    if (code === 0x07 || character === "\x9c" || (character === "\\" && this.sequence.endsWith("\x1b"))) {
      this.state = "ground";
      const [, number, text] = /^(\d+);([^\x1b]*)/.exec(this.sequence) ?? [];
      if (number === "0" || number === "2") this.onTitle(text.slice(0, 200));
    } else if (this.sequence.length < LONGEST) this.sequence += character;
    else this.state = "ground";
  }

  // Device control strings and the like, up to ESC \ (where `take` begins an escape).
  ignored(_character, code) {
    if (code === 0x07) this.state = "ground";
  }

  // --- Characters ---------------------------------------------------------------------------------------

  print(character) {
    if (COMBINING.test(character)) {
      const cell = this.lines[this.row].cells[Math.max(0, this.column - (this.pending ? 0 : 1))];
      if (cell.text.length < 12) cell.text += character;
      this.dirty.add(this.row);
      return;
    }
    const shown = this.drawing ? (LINES[character] ?? character) : character;
    const width = WIDE.test(shown) ? 2 : 1;
    if (this.pending || this.column + width > this.columns) {
      if (this.wraps) {
        this.lines[this.row].wrapped = true;
        this.column = 0;
        this.lineFeed();
      } else this.column = this.columns - width;
      this.pending = false;
    }
    const cells = this.lines[this.row].cells;
    if (this.inserting) {
      cells.splice(this.column, 0, ...Array.from({ length: width }, () => ({ text: " ", pen: this.pen })));
      cells.length = this.columns;
    }
    cells[this.column] = { text: shown, pen: this.pen };
    if (width === 2 && this.column + 1 < this.columns) cells[this.column + 1] = { text: "", pen: this.pen };
    this.dirty.add(this.row);
    this.last = character;
    this.column += width;
    if (this.column >= this.columns) {
      this.column = this.columns - 1;
      this.pending = true;
    }
  }

  control(code) {
    this.dirty.add(this.row);
    switch (code) {
      case 0x08: this.move(this.row, this.column - 1); break;
      case 0x09: this.move(this.row, Math.min(this.columns - 1, (Math.floor(this.column / 8) + 1) * 8)); break;
      case 0x0a: case 0x0b: case 0x0c: this.lineFeed(); break;
      case 0x0d: this.move(this.row, 0); break;
    }
  }

  simple(character) {
    switch (character) {
      case "7": this.save(); break;
      case "8": this.restore(); break;
      case "D": this.lineFeed(); break;
      case "E": this.column = 0; this.lineFeed(); break;
      case "M": this.reverseFeed(); break;
      case "c": this.reset(); break;
    }
  }

  move(row, column) {
    this.dirty.add(this.row);
    this.row = Math.max(0, Math.min(this.rows - 1, row));
    this.column = Math.max(0, Math.min(this.columns - 1, column));
    this.pending = false;
    this.dirty.add(this.row);
  }

  lineFeed() {
    if (this.row === this.bottom) this.scrollUp(1);
    else this.move(this.row + 1, this.column);
    this.pending = false;
  }

  reverseFeed() {
    if (this.row === this.top) this.scrollDown(1);
    else this.move(this.row - 1, this.column);
  }

  blankPen() {
    return this.pen.background === null ? PLAIN : { ...PLAIN, background: this.pen.background };
  }

  remember(line) {
    this.history.push(line);
    if (this.history.length > HISTORY) {
      this.history.shift();
      this.dropped += 1;
    }
  }

  scrollUp(count, top = this.top) {
    for (let index = 0; index < Math.min(count, this.rows); index += 1) {
      const [gone] = this.lines.splice(top, 1);
      if (top === 0 && this.other === null) this.remember(gone);
      this.lines.splice(this.bottom, 0, new Line(this.columns, this.blankPen()));
    }
    this.touchAll();
  }

  scrollDown(count, top = this.top) {
    for (let index = 0; index < Math.min(count, this.rows); index += 1) {
      this.lines.splice(this.bottom, 1);
      this.lines.splice(top, 0, new Line(this.columns, this.blankPen()));
    }
    this.touchAll();
  }

  save() {
    this.saved = { row: this.row, column: this.column, pen: this.pen };
  }

  restore() {
    this.pen = this.saved.pen;
    this.move(this.saved.row, this.saved.column);
  }

  erase(row, from, to) {
    const pen = this.blankPen();
    const cells = this.lines[row].cells;
    for (let column = from; column < to; column += 1) cells[column] = { text: " ", pen };
    this.dirty.add(row);
  }

  // --- Control sequences --------------------------------------------------------------------------------

  perform(final, sequence) {
    const mark = /^[?>=<!]/.test(sequence) ? sequence[0] : "";
    const body = mark ? sequence.slice(1) : sequence;
    if (final === "m" && !mark) {
      this.style(body);
      return;
    }
    const numbers = body.split(/[;:]/).map((part) => Math.min(parseInt(part, 10) || 0, 65535));
    const one = Math.max(1, numbers[0]);
    if (mark === "?" && (final === "h" || final === "l")) {
      for (const number of numbers) this.mode(number, final === "h");
      return;
    }
    if (mark) {
      if (mark === ">" && final === "c") this.reply("\x1b[>0;10;0c");
      return;
    }
    const base = this.originMode ? this.top : 0;
    switch (final) {
      case "A": this.move(Math.max(this.row >= this.top ? this.top : 0, this.row - one), this.column); break;
      case "B": case "e": this.move(Math.min(this.row <= this.bottom ? this.bottom : this.rows, this.row + one), this.column); break;
      case "C": case "a": this.move(this.row, this.column + one); break;
      case "D": this.move(this.row, this.column - one); break;
      case "E": this.move(this.row + one, 0); break;
      case "F": this.move(this.row - one, 0); break;
      case "G": case "`": this.move(this.row, one - 1); break;
      case "d": this.move(base + one - 1, this.column); break;
      case "H": case "f": this.move(base + one - 1, Math.max(1, numbers[1] ?? 1) - 1); break;
      case "J": this.eraseScreen(numbers[0]); break;
      case "K": this.eraseLine(numbers[0]); break;
      case "L": if (this.inRegion()) this.scrollDown(one, this.row); break;
      case "M": if (this.inRegion()) this.deleteLines(one); break;
      case "P": this.deleteCells(one); break;
      case "@": this.insertCells(one); break;
      case "X": this.erase(this.row, this.column, Math.min(this.columns, this.column + one)); break;
      case "S": this.scrollUp(one); break;
      case "T": this.scrollDown(one); break;
      case "b": for (let index = 0; index < Math.min(one, this.columns); index += 1) this.print(this.last); break;
      case "r": this.region(numbers); break;
      case "s": this.save(); break;
      case "u": this.restore(); break;
      case "h": case "l": if (numbers[0] === 4) this.inserting = final === "h"; break;
      case "c": this.reply("\x1b[?62;22c"); break;
      case "n":
        if (numbers[0] === 5) this.reply("\x1b[0n");
        if (numbers[0] === 6) this.reply(`\x1b[${this.row - base + 1};${this.column + 1}R`);
        break;
    }
  }

  inRegion() {
    return this.row >= this.top && this.row <= this.bottom;
  }

  region(numbers) {
    const top = Math.max(1, numbers[0]) - 1;
    const bottom = Math.min(this.rows, numbers[1] || this.rows) - 1;
    if (top >= bottom) return;
    this.top = top;
    this.bottom = bottom;
    this.move(this.originMode ? top : 0, 0);
  }

  mode(number, on) {
    switch (number) {
      case 1: this.applicationKeys = on; break;
      case 6: this.originMode = on; this.move(on ? this.top : 0, 0); break;
      case 7: this.wraps = on; break;
      case 25: this.cursorVisible = on; this.dirty.add(this.row); break;
      case 47: case 1047: this.alternate(on); break;
      case 1048: if (on) this.save(); else this.restore(); break;
      case 1049:
        if (on) this.save();
        this.alternate(on);
        if (!on) this.restore();
        break;
      case 2004: this.bracketedPaste = on; break;
    }
  }

  alternate(on) {
    if (on === (this.other !== null)) return;
    if (on) {
      this.other = { lines: this.lines };
      this.lines = Array.from({ length: this.rows }, () => new Line(this.columns));
    } else {
      this.lines = this.other.lines;
      this.other = null;
    }
    this.top = 0;
    this.bottom = this.rows - 1;
    this.touchAll();
  }

  eraseScreen(how) {
    if (how === 0) this.erase(this.row, this.column, this.columns);
    if (how === 1) this.erase(this.row, 0, this.column + 1);
    if (how === 3) {
      this.dropped += this.history.length;
      this.history = [];
    }
    const [from, to] = how === 0 ? [this.row + 1, this.rows] : how === 1 ? [0, this.row] : [0, this.rows];
    for (let row = from; row < to; row += 1) this.erase(row, 0, this.columns);
  }

  eraseLine(how) {
    this.erase(this.row, how === 0 ? this.column : 0, how === 1 ? this.column + 1 : this.columns);
    this.pending = false;
  }

  deleteLines(count) {
    for (let index = 0; index < Math.min(count, this.rows); index += 1) {
      this.lines.splice(this.row, 1);
      this.lines.splice(this.bottom, 0, new Line(this.columns, this.blankPen()));
    }
    this.touchAll();
  }

  deleteCells(count) {
    const cells = this.lines[this.row].cells;
    cells.splice(this.column, Math.min(count, this.columns - this.column));
    while (cells.length < this.columns) cells.push({ text: " ", pen: this.blankPen() });
    this.dirty.add(this.row);
  }

  insertCells(count) {
    const cells = this.lines[this.row].cells;
    const blank = Array.from({ length: Math.min(count, this.columns) }, () => ({ text: " ", pen: this.blankPen() }));
    cells.splice(this.column, 0, ...blank);
    cells.length = this.columns;
    this.dirty.add(this.row);
  }

  // --- Colours ------------------------------------------------------------------------------------------

  style(body) {
    const numbers = body.replaceAll(":", ";").split(";").map((part) => parseInt(part, 10) || 0);
    let { foreground, background, flags } = this.pen;
    for (let at = 0; at < numbers.length; at += 1) {
      const number = numbers[at];
      if (number === 0) [foreground, background, flags] = [null, null, 0];
      else if (number === 1) flags |= BOLD;
      else if (number === 2) flags |= DIM;
      else if (number === 3) flags |= ITALIC;
      else if (number === 4) flags |= UNDERLINE;
      else if (number === 7) flags |= INVERSE;
      else if (number === 8) flags |= HIDDEN;
      else if (number === 9) flags |= STRUCK;
      else if (number === 22) flags &= ~(BOLD | DIM);
      else if (number === 23) flags &= ~ITALIC;
      else if (number === 24) flags &= ~UNDERLINE;
      else if (number === 27) flags &= ~INVERSE;
      else if (number === 28) flags &= ~HIDDEN;
      else if (number === 29) flags &= ~STRUCK;
      else if (number >= 30 && number <= 37) foreground = number - 30;
      else if (number >= 90 && number <= 97) foreground = number - 82;
      else if (number === 39) foreground = null;
      else if (number >= 40 && number <= 47) background = number - 40;
      else if (number >= 100 && number <= 107) background = number - 92;
      else if (number === 49) background = null;
      else if (number === 38 || number === 48) {
        const [colour, used] = extended(numbers, at + 1);
        if (number === 38) foreground = colour;
        else background = colour;
        at += used;
      }
    }
    this.pen = flags === 0 && foreground === null && background === null ? PLAIN : Object.freeze({ foreground, background, flags });
  }
}

// A colour of the palette of 256 or of red, green and blue, and how many numbers it took.
function extended(numbers, at) {
  if (numbers[at] === 5) return [Math.min(255, numbers[at + 1] ?? 0), 2];
  if (numbers[at] !== 2) return [null, 1];
  const parts = numbers.slice(at + 1, at + 4).map((part) => Math.min(255, part));
  return [`rgb(${parts.join(" ")})`, 4];
}
