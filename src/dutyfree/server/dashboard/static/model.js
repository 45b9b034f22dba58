// What the page knows: sandboxes, their last actions, and figures over the last five minutes.

import { Distribution } from "./distribution.js";

export const WINDOW = 300; // seconds
export const KINDS = ["warm", "promoted", "joined", "layer", "fetched", "forked", "cold"];
export const PHASES = ["queue", "dispatch", "spawn", "run", "collect", "return"];
const HITS = new Set(["warm", "promoted", "joined"]);
const FILES = new Set(["read", "write", "list", "remove", "edit", "search"]);
const LONG = new Set(["shell", "terminal", "watch", "connect", "process_output", "process_wait"]);
const ACTIONS = 400; // kept of one sandbox, if there are not many
const ALL_ACTIONS = 40_000; // of all together
const ENDED = 200; // sandboxes kept after their end
const CAUSES = 60;
const ACTIVE = 2; // seconds after an action in which a sandbox counts as active
const ENDING = 15; // seconds

class SandboxRecord {
  constructor(id, tenant) {
    this.id = id;
    this.tenant = tenant;
    this.labels = {};
    this.group = "";
    this.served = null;
    this.spans = [];
    this.created = 0;
    this.expires = 0;
    this.lease = 0;
    this.ended = 0;
    this.paused = false;
    this.actions = [];
    this.count = 0;
    this.failed = 0;
    this.busy = 0;
    this.lastActive = 0;
    this.running = new Map();
  }

  get kind() {
    return this.served?.kind ?? "cold";
  }

  state(now) {
    if (this.ended) return "ended";
    if (this.paused) return "paused";
    return this.running.size > 0 || now - this.lastActive < ACTIVE ? "active" : "idle";
  }

  name() {
    return this.labels.name ?? this.labels.task ?? "";
  }
}

export class Model {
  constructor() {
    this.sandboxes = new Map();
    this.ended = new Map();
    this.causes = new Map();
    this.seconds = new Map();
    this.phases = new Map();
    this.pool = { served: [], saved_seconds: 0, waited_seconds: 0 };
    this.offset = 0;
    this.tenant = "";
    this.seesAll = false;
    this.version = "";
    this.started = 0;
    this.lost = 0;
    this.restarted = false;
    this.changes = 0;
  }

  now() {
    return Date.now() / 1000 + this.offset;
  }

  find(id) {
    return this.sandboxes.get(id) ?? this.ended.get(id);
  }

  apply(kind, event) {
    this.changes += 1;
    this[`on_${kind}`]?.(event);
  }

  // --- Events -------------------------------------------------------------------------------------------

  on_state(event) {
    this.offset = event.at - Date.now() / 1000;
    this.tenant = event.tenant;
    this.seesAll = Boolean(event.sees_all);
    this.version = event.version;
    this.started = event.started;
    this.pool = event.pool;
    const living = new Set((event.sandboxes ?? []).map((one) => one.sandbox));
    for (const record of [...this.sandboxes.values()]) if (!living.has(record.id)) this.end(record, event.at);
    for (const one of event.sandboxes ?? []) this.describe(one, event.at);
  }

  describe(event, at) {
    let record = this.sandboxes.get(event.sandbox);
    if (!record) {
      record = this.ended.get(event.sandbox) ?? new SandboxRecord(event.sandbox, event.tenant);
      this.ended.delete(event.sandbox);
      this.sandboxes.set(event.sandbox, record);
    }
    record.ended = 0;
    record.labels = event.labels ?? {};
    record.group = event.group ?? "";
    record.served = event.served ?? null;
    record.spans = event.spans ?? [];
    record.created = event.at;
    record.paused = Boolean(event.paused);
    if (record.expires !== event.expires) this.extend(record, event.expires, at);
  }

  extend(record, expires, from) {
    record.lease = Math.max(1, expires - from); // how long it is as a whole, as far as we know
    record.expires = expires;
  }

  on_created(event) {
    this.describe(event, event.at);
    if (event.served) this.phase("create").add(event.at, event.served.seconds);
  }

  on_began(event) {
    this.find(event.sandbox)?.running.set(event.number, event);
  }

  on_action(event) {
    this.acted(event, event.outcome === "ok" ? "ok" : "failed");
    for (const [name, , length] of event.spans ?? []) if (PHASES.includes(name)) this.phase(name).add(event.at, length);
    if (FILES.has(event.call)) this.phase("files").add(event.at, event.seconds);
    else if (event.spans && !LONG.has(event.call)) this.phase("command").add(event.at, event.seconds);
  }

  on_failure(event) {
    this.acted(event, ["infrastructure", "program"].includes(event.outcome) ? "error" : "failed");
    const key = `${event.outcome} ${event.call} ${event.error.code} ${event.error.message}`;
    const known = this.causes.get(key);
    this.causes.delete(key); // to its place at the end
    this.causes.set(key, { key, count: (known?.count ?? 0) + 1, last: event });
    if (this.causes.size > CAUSES) this.causes.delete(this.causes.keys().next().value);
  }

  acted(event, column) {
    const second = Math.floor(event.at);
    let counts = this.seconds.get(second);
    if (!counts) {
      counts = { ok: 0, failed: 0, error: 0 };
      this.seconds.set(second, counts);
      for (const old of this.seconds.keys()) if (old < this.now() - WINDOW - 5) this.seconds.delete(old);
    }
    counts[column] += 1;
    if (!event.sandbox) return;
    let record = this.find(event.sandbox);
    if (!record) {
      record = new SandboxRecord(event.sandbox, event.tenant);
      record.created = event.at - event.seconds;
      this.end(record, event.at);
    }
    record.running.delete(event.number);
    record.actions.push({ ...event, start: event.at - event.seconds });
    const most = Math.min(ACTIONS, Math.max(20, ALL_ACTIONS / (this.sandboxes.size + this.ended.size)));
    while (record.actions.length > most) record.actions.shift();
    record.count += 1;
    if (column !== "ok") record.failed += 1;
    if (!LONG.has(event.call)) record.busy += event.seconds;
    record.lastActive = Math.max(record.lastActive, event.at);
  }

  on_lease(event) {
    for (const [id, expires] of Object.entries(event.sandboxes)) {
      const record = this.find(id);
      if (!record) continue;
      if (event.change === "extended") this.extend(record, expires, event.at);
      if (event.change === "expired") record.expired = true;
    }
  }

  on_paused(event) {
    const record = this.find(event.sandbox);
    if (record) record.paused = Boolean(event.paused);
  }

  on_released(event) {
    const record = this.sandboxes.get(event.sandbox);
    if (record) this.end(record, event.at);
  }

  on_pool(event) {
    this.pool = event;
  }

  on_lost(event) {
    if (event.events === undefined || event.events === null) this.restarted = true;
    else this.lost += event.events;
  }

  end(record, at) {
    this.sandboxes.delete(record.id);
    record.ended = at;
    record.running.clear();
    this.ended.set(record.id, record);
    if (this.ended.size > ENDED) this.ended.delete(this.ended.keys().next().value);
  }

  phase(name) {
    let found = this.phases.get(name);
    if (!found) this.phases.set(name, (found = new Distribution(WINDOW)));
    return found;
  }

  // --- Figures ------------------------------------------------------------------------------------------

  // Counts of calls in the last seconds, the oldest first.
  rates(width, step) {
    const end = Math.floor(this.now() / step) * step;
    const found = [];
    for (let at = end - width; at < end; at += step) {
      const sum = { at, ok: 0, failed: 0, error: 0 };
      for (let second = at; second < at + step; second += 1) {
        const counts = this.seconds.get(second);
        if (counts) for (const name of ["ok", "failed", "error"]) sum[name] += counts[name];
      }
      found.push(sum);
    }
    return found;
  }

  perSecond(width = 10) {
    return this.rates(width, 1).reduce((sum, one) => sum + one.ok + one.failed + one.error, 0) / width;
  }

  hits() {
    let hits = 0;
    let all = 0;
    for (const one of this.pool.served ?? []) {
      all += one.count;
      if (HITS.has(one.kind)) hits += one.count;
    }
    return { hits, all };
  }

  ending() {
    const now = this.now();
    return [...this.sandboxes.values()]
      .filter((one) => one.expires - now < ENDING)
      .sort((one, other) => one.expires - other.expires);
  }

  members(group) {
    const all = [...this.sandboxes.values(), ...this.ended.values()];
    return all.filter((one) => one.group === group).sort((one, other) => one.created - other.created || (one.id < other.id ? -1 : 1));
  }

  groups() {
    const found = new Map();
    for (const one of this.sandboxes.values()) {
      if (!one.group) continue;
      if (!found.has(one.group)) found.set(one.group, []);
      found.get(one.group).push(one);
    }
    return [...found.entries()].map(([id, members]) => ({ id, members }));
  }

  failuresWithin(width, column = "error") {
    return this.rates(width, 1).reduce((sum, one) => sum + one[column], 0);
  }
}
