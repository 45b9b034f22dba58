// One sandbox: where it came from, its actions as a timeline, and a terminal.

import * as charts from "./charts.js";
import { h, keyed, onWidth, s, setAttribute, setText } from "./dom.js";
import { clock, count, duration, seconds } from "./format.js";
import { PHASES } from "./model.js";
import { panel, scrolling } from "./overview.js";
import { TerminalPanel } from "./terminal.js";

const SPANS = { "1 min": 60, "5 min": 300, All: Infinity };
const KEEP = 600; // seconds that the button extends a lease to
const ROWS = 200;

export class SandboxView {
  constructor(model, id, api) {
    this.model = model;
    this.id = id;
    this.api = api;
    this.title = id;
    this.span = 300;
    this.terminal = null;
    this.state = h("span", { class: "state" });
    this.message = h("p", { class: "cause", role: "alert" });
    this.keep = h("button", { type: "button", onclick: () => this.extend() }, "Keep for 10 min");
    this.end = h("button", { type: "button", class: "danger", onclick: () => this.remove() }, "End sandbox");
    this.facts = h("dl", { class: "facts" });
    this.chart = s("svg", { class: "chart" });
    this.rows = h("tbody");
    this.empty = h("p", { class: "empty" }, "No action is known. The server keeps the last 4,096 events.");
    this.choice = Object.entries(SPANS).map(([name, span]) => h("button", { type: "button", "aria-pressed": String(span === this.span), onclick: () => this.choose(span) }, name));
    this.terminalBox = h("div");
    const head = h("tr", {}, ...["Ended", "Call"].map((name) => h("th", { scope: "col" }, name)), h("th", { scope: "col", class: "fill" }, "Command or path"), ...["Phases", "Result"].map((name) => h("th", { scope: "col" }, name)), h("th", { scope: "col", class: "number" }, "Took"));
    const legend = h("p", { class: "legend" }, ...PHASES.map((name) => h("span", {}, h("i", { class: `swatch phase-${name}` }), name)));
    this.node = h("div", { class: "grid" },
      h("div", { class: "head" }, h("h1", {}, id), this.state, h("div", { class: "tools" }, this.keep, this.end), this.message),
      panel("", "About", null, this.facts),
      panel("", "Timeline", h("div", { class: "tools", role: "group", "aria-label": "Time span" }, this.choice), h("div", {}, this.chart), legend),
      panel("w7", "Actions", h("p", { class: "note" }, "the latest first"), h("div", { class: "tall", tabindex: "0", role: "region", "aria-label": "Actions, scrollable" }, h("table", {}, h("thead", {}, head), this.rows)), this.empty),
      panel("w5", "Terminal", null, this.terminalBox));
    this.observers = [onWidth(this.chart.parentElement, () => this.render())];
  }

  close() {
    for (const observer of this.observers) observer.disconnect();
    this.terminal?.close();
  }

  choose(span) {
    this.span = span;
    this.choice.forEach((button, index) => button.setAttribute("aria-pressed", String(Object.values(SPANS)[index] === span)));
    this.render();
  }

  async extend() {
    await this.say(this.api("POST", "/v1/keep_alive", { sandboxes: [this.id], lease: KEEP }));
  }

  async remove() {
    if (confirm(`End ${this.id}? Its processes and files will be gone.`)) {
      await this.say(this.api("DELETE", `/v1/sandboxes/${encodeURIComponent(this.id)}`));
    }
  }

  async say(work) {
    try {
      await work;
      setText(this.message, "");
    } catch (error) {
      setText(this.message, error.message);
    }
  }

  render() {
    const record = this.model.find(this.id);
    const now = this.model.now();
    if (!record) {
      setText(this.state, this.model.version ? "not known: it has ended, or it is not yours" : "");
      setAttribute(this.state, "data-state", "ended");
      this.keep.hidden = this.end.hidden = true;
      return;
    }
    const state = record.state(now);
    const own = record.tenant === this.model.tenant;
    setText(this.state, state === "ended" && record.expired ? "ended: its lease was over" : state);
    setAttribute(this.state, "data-state", state);
    this.keep.hidden = this.end.hidden = state === "ended" || !own;
    this.renderFacts(record, now, state);
    this.renderTimeline(record, now, state);
    this.renderRows(record, now);
    this.offerTerminal(record, state, own);
  }

  renderFacts(record, now, state) {
    const { served } = record;
    const facts = [["Tenant", record.tenant], ["Created", `${clock(record.created)}, ${duration((record.ended || now) - record.created)} ${record.ended ? "long" : "ago"}`]];
    if (state !== "ended") facts.push(["Lease ends", `in ${duration(record.expires - now)}`]);
    if (served) {
      facts.push(["Came from", served.stage === "none" ? served.kind : `${served.kind} · ${served.stage}`], ["Ready in", seconds(served.seconds || 1e-7)], ["A cold start", seconds(served.cold_seconds)]);
    }
    facts.push(["Actions", `${count(record.count)}, ${count(record.failed)} failed`], ["Time in actions", seconds(record.busy)]);
    for (const [name, value] of Object.entries(record.labels)) facts.push([`Label ${name}`, value]);
    keyed(this.facts, facts, ([name]) => name, ([name]) => h("div", {}, h("dt", {}, name), h("dd")), (node, [, value]) => setText(node.lastChild, value));
    if (record.group && !this.groupLink) {
      this.groupLink = h("div", {}, h("dt", {}, "Group"), h("dd", {}, h("a", { href: `#/group/${encodeURIComponent(record.group)}` }, "compare its members")));
      this.facts.append(this.groupLink);
    }
  }

  renderTimeline(record, now, state) {
    const width = this.chart.parentElement.clientWidth;
    if (!width) return;
    const to = state === "ended" ? record.ended : now;
    const first = Math.max(record.created, Math.min(record.actions[0]?.start ?? to, to));
    const from = Math.max(to - this.span, Math.min(first, to - 1));
    const running = [...record.running.values()].map((one) => ({ ...one, start: one.at, at: now, outcome: "ok" }));
    charts.timeline(this.chart, [...record.actions, ...running], from, to, width);
  }

  renderRows(record, now) {
    const running = [...record.running.values()].map((one) => ({ ...one, isRunning: true }));
    const shown = [...record.actions.slice(-ROWS), ...running].reverse();
    this.empty.hidden = shown.length > 0;
    keyed(this.rows, shown, (one) => `${one.number} ${Boolean(one.isRunning)}`, (one) => {
      const result = one.isRunning ? "runs" : one.error ? `${one.outcome}: ${one.error.code}` : one.outcome === "ok" ? (one.exit_code === undefined || one.exit_code === null ? "ok" : "exit 0") : one.outcome === "timeout" ? "timeout" : `exit ${one.exit_code}`;
      return h("tr", {}, h("td", {}, one.isRunning ? "now" : clock(one.at)), h("td", {}, one.call), h("td", { class: "fill label", title: one.label ?? "" }, one.label ?? ""), h("td", {}, one.spans ? charts.phaseBar(one.spans, one.seconds) : ""), h("td", { class: "outcome", "data-outcome": one.outcome ?? "ok", title: one.error?.message ?? "" }, one.oom ? `${result}, out of memory` : result), h("td", { class: "number" }, one.isRunning ? "" : seconds(one.seconds)));
    }, (row, one) => {
      if (one.isRunning) setText(row.lastChild, `${duration(now - one.at)}…`);
    });
  }

  offerTerminal(record, state, own) {
    if (this.terminal || this.terminalBox.dataset.for === `${state === "ended"} ${own}`) return;
    this.terminalBox.dataset.for = `${state === "ended"} ${own}`;
    if (state === "ended" || !own) {
      const why = own ? "The sandbox has ended." : `Only ${record.tenant} may open a terminal in this sandbox.`;
      this.terminalBox.replaceChildren(h("p", { class: "empty" }, why));
      return;
    }
    const open = h("button", { type: "button", class: "primary", onclick: () => {
      this.terminal = new TerminalPanel(this.id, this.api.token());
      this.terminalBox.replaceChildren(this.terminal.node);
      this.terminal.open();
    } }, "Open a terminal");
    this.terminalBox.replaceChildren(h("p", { class: "empty" }, "A shell in the sandbox, beside what runs there."), open);
  }
}
