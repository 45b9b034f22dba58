// One group: sandboxes that began in the same state, on one clock and step by step.

import * as charts from "./charts.js";
import { h, keyed, onWidth, s, setAttribute, setText } from "./dom.js";
import { count, plural, seconds, shortId } from "./format.js";
import { link, panel, scrolling } from "./overview.js";

const STEPS = 40;
const MEMBERS = 64;

export class GroupView {
  constructor(model, id) {
    this.model = model;
    this.id = id;
    this.title = `group ${shortId(id)}`;
    this.summary = h("p", { class: "note" });
    this.lanes = h("div", { class: "lanes" });
    this.axis = s("svg", { class: "chart", "aria-hidden": "true" });
    this.steps = h("table", { class: "steps" });
    this.head = h("tr");
    this.body = h("tbody");
    this.steps.append(h("thead", {}, this.head), this.body);
    this.empty = h("p", { class: "empty" }, "No member of this group is known.");
    this.node = h("div", { class: "grid" }, h("div", { class: "head" }, h("h1", {}, `Group ${shortId(id)}`), this.summary), panel("", "On one clock", h("p", { class: "note" }, "from the creation on"), this.lanes, this.empty), panel("", "Step by step", h("p", { class: "note" }, "the last steps of each member"), scrolling("Steps of the members", this.steps)));
    this.observers = [onWidth(this.lanes, () => this.render())];
  }

  close() {
    for (const observer of this.observers) observer.disconnect();
  }

  render() {
    const now = this.model.now();
    const all = this.model.members(this.id);
    const members = all.slice(0, MEMBERS);
    this.empty.hidden = members.length > 0;
    if (members.length === 0) return;
    const from = Math.min(...members.map((one) => one.created));
    const to = Math.max(from + 1, ...members.map((one) => one.ended || Math.max(one.lastActive, Math.min(now, one.lastActive + 2))));
    const actions = members.reduce((sum, one) => sum + one.count, 0);
    const living = members.filter((one) => !one.ended).length;
    setText(this.summary, `${plural(all.length, "member")}, ${count(living)} live; ${plural(actions, "action")}`);
    this.renderLanes(members, from, to, now);
    this.renderSteps(members);
  }

  renderLanes(members, from, to, now) {
    const heads = ["Member", "", "Actions", "Failed", "In actions"].map((name, index) => ({ key: `head ${index}`, head: name, index }));
    const items = [...heads, ...members.flatMap((member) => ["name", "lane", "count", "failed", "busy"].map((part) => ({ key: `${member.id} ${part}`, member, part }))), { key: "axis gap", part: "gap" }, { key: "axis", part: "axis" }];
    keyed(this.lanes, items, (item) => item.key, (item) => {
      if (item.head !== undefined) return h("span", { class: item.index > 2 ? "h number wide-only" : "h" + (item.index === 2 ? " number" : "") }, item.head);
      if (item.part === "name") return h("span", {}, h("span", { class: "state" }, h("span", { class: "visually-hidden" })), " ", link(item.member));
      if (item.part === "lane") return h("div", {}, s("svg", { class: "chart" }));
      if (item.part === "axis") return h("div", {}, s("svg", { class: "chart" }));
      if (item.part === "gap") return h("span");
      return h("span", { class: item.part === "count" ? "number" : "number wide-only" });
    }, (node, { member, part }) => {
      if (part === "name") {
        setAttribute(node.firstChild, "data-state", member.state(now));
        setText(node.firstChild.firstChild, member.state(now));
      }
      if (part === "lane" && node.clientWidth) {
        const label = `${shortId(member.id)}: ${plural(member.count, "action")}, ${count(member.failed)} failed`;
        charts.timeline(node.firstChild, member.actions, from, to, node.clientWidth, { axis: false, most: 1, lane: 18, plain: true, label });
      }
      if (part === "axis" && node.clientWidth) charts.timeline(node.firstChild, [], from, to, node.clientWidth, { lane: 1, relative: true, label: "Seconds since the creation" });
      if (part === "count") setText(node, count(member.count));
      if (part === "failed") setText(node, count(member.failed));
      if (part === "busy") setText(node, seconds(member.busy));
    });
  }

  renderSteps(members) {
    keyed(this.head, [null, ...members], (one) => one?.id ?? "", (one) => h("th", { scope: "col" }, one ? link(one) : h("span", { class: "visually-hidden" }, "Step")));
    const first = Math.max(0, Math.max(...members.map((one) => one.count)) - STEPS);
    const last = Math.max(...members.map((one) => one.count));
    const numbers = Array.from({ length: last - first }, (_, index) => first + index);
    keyed(this.body, numbers, (number) => number, (number) => h("tr", {}, h("td", {}, count(number + 1))), (row, number) => {
      members.forEach((member, index) => {
        const action = member.actions[number - (member.count - member.actions.length)];
        let cell = row.children[index + 1];
        if (!cell) row.append((cell = h("td", { class: "cut" })));
        setText(cell, action ? action.label || action.call : "");
        setAttribute(cell, "title", action ? `${action.call} ${action.label ?? ""}: ${action.outcome}, ${seconds(action.seconds)}` : "");
        setAttribute(cell, "data-outcome", action ? charts.outcomeClass(action) : "");
      });
    });
  }
}
