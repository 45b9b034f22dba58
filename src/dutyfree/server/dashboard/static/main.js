// The dashboard. Events of the server change the model, and the view of the address shows it once a second
// at least, and twice a second at most.

import { h, setText } from "./dom.js";
import { duration, plural } from "./format.js";
import { GroupView } from "./group.js";
import { Model } from "./model.js";
import { Overview } from "./overview.js";
import { SandboxView } from "./sandbox.js";
import { Stream } from "./stream.js";

const FRAME = 500; // milliseconds between two renderings
const TOKEN = "dutyfree.token";
const THEME = "dutyfree.theme";
const byId = (id) => document.getElementById(id);

class Dashboard {
  constructor() {
    this.main = byId("main");
    this.model = new Model();
    this.view = null;
    this.planned = 0;
    addEventListener("hashchange", () => this.route(true));
    document.addEventListener("visibilitychange", () => this.plan(0));
    setInterval(() => this.plan(0), 1000); // clocks go on, also if nothing happens
    byId("sign-out").addEventListener("click", () => this.signOut());
    setUpTheme(byId("theme"), () => this.plan(0));
    this.connect();
  }

  token() {
    return sessionStorage.getItem(TOKEN) ?? "";
  }

  connect() {
    this.stream?.stop();
    this.model = new Model();
    this.stream = new Stream({
      event: (kind, data) => this.receive(kind, data),
      status: (state, detail) => this.status(state, detail),
      refused: (message, hadToken) => this.askForToken(hadToken ? message : ""),
    }, this.token());
    byId("sign-out").hidden = !this.token();
    this.route(false);
    this.stream.run();
  }

  receive(kind, data) {
    this.model.apply(kind, data);
    if (kind === "bye") this.status("offline", data.reason);
    this.plan(FRAME);
  }

  status(state, detail = "") {
    byId("status").dataset.state = state;
    setText(byId("status-text"), detail ? `${state}: ${detail}` : state);
  }

  // --- Views --------------------------------------------------------------------------------------------

  route(byUser) {
    this.view?.close();
    const [, name, id] = location.hash.split("/");
    const given = id ? safelyDecoded(id) : "";
    const api = Object.assign((...call) => this.call(...call), { token: () => this.token() });
    if (name === "sandbox" && given) this.view = new SandboxView(this.model, given, api);
    else if (name === "group" && given) this.view = new GroupView(this.model, given);
    else if (location.hash === "#main") return; // the link that skips the header
    else this.view = new Overview(this.model);
    document.title = `${this.view.title} · dutyfree`;
    this.main.replaceChildren(...(this.view instanceof Overview ? [] : [back()]), this.view.node);
    if (byUser) {
      scrollTo(0, 0);
      this.main.focus({ preventScroll: true });
    }
    this.render();
  }

  plan(delay) {
    if (this.planned || document.hidden) return;
    this.planned = setTimeout(() => {
      this.planned = 0;
      requestAnimationFrame(() => this.render());
    }, delay);
  }

  render() {
    const { model } = this;
    if (model.version) {
      const whose = model.seesAll ? "all tenants" : `tenant ${model.tenant}`;
      const lost = `${model.restarted ? " · started again" : ""}${model.lost ? ` · ${plural(model.lost, "event")} lost` : ""}`;
      setText(byId("server"), `${location.host} · ${model.version} · up ${duration(model.now() - model.started)} · ${whose}${lost}`);
    }
    this.view?.render();
  }

  async call(method, path, body) {
    const headers = { "Content-Type": "application/json" };
    if (this.token()) headers.Authorization = `Bearer ${this.token()}`;
    const answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
    if (!answer.ok) {
      const found = await answer.json().catch(() => null);
      throw new Error(found?.error?.message ?? `the server answered with status ${answer.status}`);
    }
  }

  // --- The token ----------------------------------------------------------------------------------------

  askForToken(message) {
    this.view?.close();
    this.view = null;
    sessionStorage.removeItem(TOKEN);
    this.status("signed out");
    byId("sign-out").hidden = true;
    setText(byId("server"), location.host);
    document.title = "sign in · dutyfree";
    const field = h("input", { id: "token", type: "password", name: "token", autocomplete: "current-password", required: true, spellcheck: "false", "aria-describedby": "token-help token-error" });
    const form = h("form", { onsubmit: (event) => {
      event.preventDefault();
      sessionStorage.setItem(TOKEN, field.value.trim());
      this.connect();
    } }, h("label", { for: "token" }, "Token"), field, h("p", { class: "note", id: "token-help" }, "Create one on the server: dutyfree token create NAME. A token of the tenant operator sees all tenants. The page keeps it until you close the tab."), h("p", { class: "cause", id: "token-error", role: "alert" }, message), h("button", { type: "submit", class: "primary" }, "Sign in"));
    this.main.replaceChildren(h("section", { class: "panel sign-in", "aria-label": "Sign in" }, h("h1", {}, "Sign in"), form));
    field.focus();
  }

  signOut() {
    this.stream.stop();
    sessionStorage.removeItem(TOKEN);
    this.connect();
  }
}

function back() {
  return h("nav", { "aria-label": "Breadcrumb" }, h("a", { href: "#/" }, "← Overview"));
}

function safelyDecoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function setUpTheme(button, changed) {
  const names = { "": "system", light: "light", dark: "dark" };
  const show = () => setText(button, `Theme: ${names[document.documentElement.dataset.theme ?? ""]}`);
  button.addEventListener("click", () => {
    const order = ["", "light", "dark"];
    const next = order[(order.indexOf(document.documentElement.dataset.theme ?? "") + 1) % order.length];
    if (next) document.documentElement.dataset.theme = next;
    else delete document.documentElement.dataset.theme;
    localStorage.setItem(THEME, next);
    show();
    changed();
  });
  show();
}

new Dashboard();
