// The overview: everything at a glance.

import * as charts from "./charts.js";
import { h, keyed, onWidth, s, setAttribute, setText } from "./dom.js";
import { quantile } from "./distribution.js";
import { clock, count, duration, percent, plural, rate, seconds, shortId } from "./format.js";
import { KINDS, PHASES, WINDOW } from "./model.js";

const STEP = 2; // seconds of a bar
const ROWS = 60; // of the table of sandboxes
const MEANINGS = {
  warm: "an idle sandbox in this state",
  promoted: "an idle sandbox; missing stages ran",
  joined: "work that was in progress",
  layer: "a new sandbox on a stored layer",
  fetched: "a new sandbox on a layer from a peer",
  forked: "a copy of another sandbox",
  cold: "nothing was ready",
};

export class Overview {
  constructor(model) {
    this.model = model;
    this.title = "overview";
    this.filter = "";
    this.widths = new Map();
    this.figures = {};
    this.node = h("div", { class: "grid" }, h("h1", { class: "visually-hidden" }, "Overview"), this.strip(), h("div", { class: "column w7" }, this.rate(), this.warmth(), this.table()), h("div", { class: "column w5" }, this.latency(), this.pool(), ...this.side()));
    this.observers = [this.rateChart, this.phaseChart, this.cellsBox].map((node) => onWidth(node.parentElement === null ? node : node.parentElement, () => this.render()));
  }

  close() {
    for (const observer of this.observers) observer.disconnect();
  }

  strip() {
    const names = { live: "Live sandboxes", rate: "Actions per second", latency: "Command, p50", hits: "Served by the pool", saved: "Saved", errors: "Errors, 5 min" };
    const list = h("dl", { class: "panel figures", "aria-label": "Key figures" });
    for (const [key, name] of Object.entries(names)) {
      const value = h("span", { class: "value" });
      const more = h("span", { class: "more" });
      this.figures[key] = { value, more };
      list.append(h("div", {}, h("dt", {}, name), h("dd", {}, h("div", {}, value), h("div", { class: "more" }, more))));
    }
    return list;
  }

  rate() {
    this.rateChart = s("svg", { class: "chart" });
    const legend = h("p", { class: "legend note" }, ...[["ok", "succeeded"], ["failed", "failed by its own doing"], ["error", "error"]].map(([name, text]) => h("span", {}, h("i", { class: `swatch ${name}-swatch` }), text)));
    return panel("", "Actions per second", legend, h("div", {}, this.rateChart));
  }

  latency() {
    this.phaseChart = s("svg", { class: "chart" });
    return panel("", "Latency by phase", h("p", { class: "note" }, "the last 5 minutes"), h("div", {}, this.phaseChart));
  }

  warmth() {
    this.cellsBox = h("div", { class: "warmth" });
    this.noSandboxes = h("p", { class: "empty" }, "No sandboxes. Create one: POST /v1/sandboxes");
    const legend = h("p", { class: "legend note" }, h("span", {}, "filled: active"), h("span", {}, "pale: idle"), h("span", {}, "outlined: paused"));
    return panel("", "Sandboxes by warmth and state", legend, h("div", {}, this.cellsBox), this.noSandboxes);
  }

  pool() {
    this.poolRows = h("tbody");
    this.poolNote = h("p", { class: "note" });
    this.poolCounters = h("p", { class: "counters" });
    const head = h("tr", {}, ...["Came from", "Found ready"].map((name) => h("th", { scope: "col" }, name)), ...["Served", "Share", "Mean"].map((name) => h("th", { scope: "col", class: "number" }, name)), h("th", { scope: "col", class: "fill" }, h("span", { class: "visually-hidden" }, "Share as a bar")));
    return panel("", "Pool: what sandboxes came from", this.poolNote, scrolling("Pool by stage", h("table", {}, h("thead", {}, head), this.poolRows)), this.poolCounters);
  }

  table() {
    this.rows = h("tbody");
    this.tenantHead = h("th", { scope: "col" }, "Tenant");
    this.tableNote = h("p", { class: "note", "aria-live": "off" });
    const search = h("input", { type: "search", placeholder: "id, label, state or command", "aria-label": "Filter the sandboxes", oninput: (event) => { this.filter = event.target.value.toLowerCase(); this.render(); } });
    const head = h("tr", {}, h("th", { scope: "col" }, "Sandbox"), this.tenantHead, ...["State", "Came from", "Lease"].map((name) => h("th", { scope: "col" }, name)), h("th", { scope: "col", class: "number" }, "Actions"), h("th", { scope: "col", class: "fill" }, "Last action"), h("th", { scope: "col", class: "number" }, "Took"));
    const found = panel("", "Sandboxes", h("div", { class: "tools" }, search), scrolling("Sandboxes", h("table", {}, h("thead", {}, head), this.rows)), h("p", { class: "note" }, this.tableNote));
    return found;
  }

  side() {
    this.endingList = h("ul", { class: "list" });
    this.failureList = h("ul", { class: "list" });
    this.groupList = h("ul", { class: "list" });
    this.endingEmpty = h("p", { class: "empty" }, "None within 15 seconds");
    this.failureEmpty = h("p", { class: "empty" }, "No call has failed");
    this.groupPanel = panel("", "Groups", h("p", { class: "note" }, "from one creation"), this.groupList);
    return [panel("", "Failures by cause", h("p", { class: "note" }, "the latest first"), this.failureList, this.failureEmpty), panel("", "Leases about to end", null, this.endingList, this.endingEmpty), this.groupPanel];
  }

  // --- Rendering ----------------------------------------------------------------------------------------

  render() {
    const now = this.model.now();
    this.renderFigures(now);
    const width = this.rateChart.parentElement.clientWidth;
    if (width) charts.rates(this.rateChart, this.model.rates(WINDOW, STEP), STEP, width);
    this.renderPhases(now);
    this.renderWarmth(now);
    this.renderPool();
    this.renderTable(now);
    this.renderSide(now);
  }

  renderFigures(now) {
    const { model, figures } = this;
    const set = (key, value, more, alarm = false) => {
      setText(figures[key].value, value);
      setText(figures[key].more, more);
      figures[key].value.classList.toggle("alarm", alarm);
    };
    const states = tally([...model.sandboxes.values()].map((one) => one.state(now)));
    set("live", count(model.sandboxes.size), `${count(states.active ?? 0)} active, ${count(states.paused ?? 0)} paused`);
    const rates = model.rates(WINDOW, 1);
    const most = Math.max(...rates.map((one) => one.ok + one.failed + one.error));
    set("rate", rate(model.perSecond()), `at most ${count(most)} in 5 min`);
    const command = model.phase("command").total(now);
    set("latency", seconds(quantile(command, 0.5)), `p95 ${seconds(quantile(command, 0.95))}, n = ${count(command.count)}`);
    const { hits, all } = model.hits();
    set("hits", percent(hits, all), `${count(hits)} of ${plural(all, "sandbox", "sandboxes")}`);
    set("saved", duration(Math.max(0, model.pool.saved_seconds ?? 0)), "compared with cold starts");
    const errors = model.failuresWithin(WINDOW);
    set("errors", count(errors), `and ${plural(model.failuresWithin(WINDOW, "failed"), "failed action")}`, errors > 0);
  }

  renderPhases(now) {
    const width = this.phaseChart.parentElement.clientWidth;
    if (!width) return;
    const rows = [["create", "create", ""], ...PHASES.map((name) => [name, name, `phase-${name}`]), ["files", "files", ""]]
      .map(([name, key, colour]) => ({ name, colour, total: this.model.phase(key).total(now) }))
      .filter((row) => row.total.count > 0 || row.name !== "queue");
    charts.phases(this.phaseChart, rows, width);
  }

  renderWarmth(now) {
    const by = new Map();
    for (const one of this.model.sandboxes.values()) {
      if (!by.has(one.kind)) by.set(one.kind, []);
      by.get(one.kind).push(one.state(now));
    }
    const shown = KINDS.filter((kind) => by.has(kind));
    this.noSandboxes.hidden = shown.length > 0;
    const items = shown.flatMap((kind) => ["name", "total", "cells"].map((part) => ({ kind, part })));
    const width = this.cellsBox.clientWidth - 150;
    keyed(this.cellsBox, items, (item) => `${item.kind} ${item.part}`, ({ kind, part }) => {
      if (part === "name") return h("span", { title: MEANINGS[kind] }, h("i", { class: `swatch kind-${kind}` }), kind);
      if (part === "total") return h("span", { class: "total" });
      return h("div", {}, s("svg", { class: "cells", "aria-hidden": "true" }), h("span", { class: "visually-hidden" }));
    }, (node, { kind, part }) => {
      const states = by.get(kind).sort();
      if (part === "total") setText(node, count(states.length));
      if (part === "cells") {
        const counts = tally(states);
        setText(node.lastChild, Object.entries(counts).map(([state, number]) => `${number} ${state}`).join(", "));
        charts.cells(node.firstChild, kind, states, Math.max(60, width));
      }
    });
  }

  renderPool() {
    const { pool } = this.model;
    const served = [...(pool.served ?? [])].sort((one, other) => KINDS.indexOf(one.kind) - KINDS.indexOf(other.kind));
    const all = served.reduce((sum, one) => sum + one.count, 0);
    setText(this.poolNote, all ? `since ${clock(this.model.started)}` : "nothing was served yet");
    keyed(this.poolRows, served, (one) => `${one.kind} ${one.stage}`, (one) => {
      const bar = h("span", { class: `share kind-${one.kind}` });
      return h("tr", {}, h("td", { title: MEANINGS[one.kind] }, h("i", { class: `swatch kind-${one.kind}` }), one.kind), h("td", {}, one.stage), h("td", { class: "number" }), h("td", { class: "number" }), h("td", { class: "number" }), h("td", { class: "fill" }, bar));
    }, (row, one) => {
      setText(row.children[2], count(one.count));
      setText(row.children[3], percent(one.count, all));
      setText(row.children[4], seconds(one.seconds || 1e-7));
      row.children[5].firstChild.style.width = `${(100 * one.count) / all}%`;
    });
    const counters = [...Object.entries(pool.sandboxes ?? {}), ...Object.entries(pool.events ?? {})].filter(([name, number]) => number && name !== "budget");
    this.poolCounters.hidden = counters.length === 0;
    keyed(this.poolCounters, counters, ([name]) => name, ([name]) => h("span", {}, h("b"), ` ${name}`), (node, [, number]) => setText(node.firstChild, count(number)));
  }

  renderTable(now) {
    const { model } = this;
    const tenants = new Set([...model.sandboxes.values()].map((one) => one.tenant));
    const many = model.seesAll && (tenants.size > 1 || (tenants.size === 1 && !tenants.has(model.tenant)));
    this.tenantHead.hidden = !many;
    const found = [...model.sandboxes.values()].filter((one) => matches(one, this.filter, now));
    found.sort((one, other) => other.created - one.created || (one.id < other.id ? -1 : 1));
    const shown = found.slice(0, ROWS);
    keyed(this.rows, shown, (one) => one.id, (one) => sandboxRow(one), (row, one) => updateRow(row, one, now, many));
    const rest = found.length - shown.length;
    setText(this.tableNote, found.length === 0 ? (this.filter ? "No sandbox matches." : "No sandboxes.") : rest > 0 ? `and ${count(rest)} more: filter to see them` : "");
  }

  renderSide(now) {
    const { model } = this;
    const ending = model.ending().slice(0, 8);
    this.endingEmpty.hidden = ending.length > 0;
    keyed(this.endingList, ending, (one) => one.id, (one) => h("li", {}, h("div", { class: "row" }, h("span", { class: "cut" }, link(one), " ", h("span", { class: "note" }, one.name())), h("span", { class: "outcome", "data-outcome": "failed" }))), (node, one) => {
      setText(node.firstChild.lastChild, `in ${duration(one.expires - now)}`);
    });
    const causes = [...model.causes.values()].reverse().slice(0, 6);
    this.failureEmpty.hidden = causes.length > 0;
    keyed(this.failureList, causes, (one) => one.key, (one) => causeItem(one), updateCause);
    const groups = model.groups().sort((one, other) => other.members[0].created - one.members[0].created).slice(0, 8);
    this.groupPanel.hidden = groups.length === 0;
    keyed(this.groupList, groups, (one) => one.id, (one) => h("li", {}, h("div", { class: "row" }, h("span", { class: "cut" }, h("a", { href: `#/group/${encodeURIComponent(one.id)}`, class: "mono" }, shortId(one.id)), " ", h("span", { class: "note" }, one.members[0].name())), h("span", { class: "note" }))), (node, one) => {
      const actions = one.members.reduce((sum, member) => sum + member.count, 0);
      setText(node.firstChild.lastChild, `${count(one.members.length)} members, ${plural(actions, "action")}`);
    });
  }
}

// --- Parts ------------------------------------------------------------------------------------------------

export function panel(width, title, aside, ...children) {
  return h("section", { class: `panel ${width}`.trim(), "aria-label": title }, h("header", {}, h("h2", {}, title), aside), ...children);
}

export function scrolling(label, ...children) {
  return h("div", { class: "scroll", role: "region", "aria-label": `${label}, scrollable`, tabindex: "0" }, ...children);
}

export function link(one) {
  return h("a", { href: `#/sandbox/${encodeURIComponent(one.id)}`, class: "mono", title: one.id }, shortId(one.id));
}

function tally(values) {
  const found = {};
  for (const value of values) found[value] = (found[value] ?? 0) + 1;
  return found;
}

function matches(one, filter, now) {
  if (!filter) return true;
  const texts = [one.id, one.tenant, one.state(now), one.kind, one.actions.at(-1)?.label ?? "", ...Object.entries(one.labels).flat()];
  return texts.some((text) => text.toLowerCase().includes(filter));
}

function sandboxRow(one) {
  const bar = h("span", { class: "meter", "aria-hidden": "true" }, h("i"));
  return h("tr", {}, h("td", {}, link(one), h("span", { class: "note" }, one.name() ? `  ${one.name()}` : "")), h("td", {}, one.tenant), h("td", {}, h("span", { class: "state" })), h("td", {}, h("i", { class: `swatch kind-${one.kind}` }), h("span", {}, one.served && one.served.stage !== "none" ? `${one.kind} · ${one.served.stage}` : one.kind)), h("td", {}, bar, h("span")), h("td", { class: "number" }), h("td", { class: "fill label" }), h("td", { class: "number" }));
}

function updateRow(row, one, now, many) {
  const [, tenant, state, , lease, actions, last, took] = row.children;
  tenant.hidden = !many;
  const current = one.state(now);
  setText(state.firstChild, current);
  setAttribute(state.firstChild, "data-state", current);
  const left = Math.max(0, one.expires - now);
  const share = Math.min(1, left / one.lease);
  lease.firstChild.firstChild.style.width = `${Math.round(100 * share)}%`;
  lease.firstChild.classList.toggle("low", left < 15);
  setText(lease.lastChild, duration(left));
  setText(actions, count(one.count));
  const running = [...one.running.values()].at(-1);
  const action = running ?? one.actions.at(-1);
  setText(last, action ? (action.label || action.call) : "");
  setAttribute(last, "title", action ? `${action.call} ${action.label ?? ""}` : "");
  setText(took, running ? `${duration(now - running.at)}…` : action ? seconds(action.seconds) : "");
}

function causeItem({ last }) {
  return h("li", {}, h("div", { class: "row" }, h("span", { class: "cut" }, h("b", {}, last.call), " ", h("span", { class: "label" })), h("span", { class: "note" }), h("span", { class: "note" })), h("p", { class: "cause", "data-outcome": last.outcome }, `${last.outcome}: ${last.error.message}`), last.error.remedy ? h("p", { class: "note" }, last.error.remedy) : null);
}

function updateCause(node, { last, count: number }) {
  const [what, times, where] = node.firstChild.children;
  setText(what.lastChild, last.label ?? "");
  setText(times, number > 1 ? `${count(number)} times, ` + clock(last.at) : clock(last.at));
  if (last.sandbox && where.dataset.sandbox !== last.sandbox) {
    where.dataset.sandbox = last.sandbox;
    if (!where.contains(document.activeElement)) where.replaceChildren(link({ id: last.sandbox }));
  }
}
