// The event stream of the server. EventSource cannot send a token, so this reads the stream with fetch.

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 15_000;
const REPLAYED = 4096;
const SILENCE = 45_000; // the server sends something every 15 seconds

export class Stream {
  // `handlers`: event(kind, data), status(text, detail) and refused(message).
  constructor(handlers, token) {
    this.handlers = handlers;
    this.token = token;
    this.last = "";
    this.stopped = new AbortController();
  }

  stop() {
    this.stopped.abort();
  }

  async run() {
    let pause = FIRST_PAUSE;
    while (!this.stopped.signal.aborted) {
      try {
        this.handlers.status("connecting");
        const answer = await this.open();
        if (answer.status === 401 || answer.status === 403) {
          const found = await answer.json().catch(() => null);
          this.handlers.refused(found?.error?.message ?? "the server refused the token", Boolean(this.token));
          return;
        }
        if (!answer.ok) throw new Error(`status ${answer.status}`);
        this.handlers.status("live");
        pause = FIRST_PAUSE;
        await this.read(answer.body);
      } catch (error) {
        if (this.stopped.signal.aborted) return;
      }
      this.handlers.status("offline", `next try in ${Math.round(pause / 1000) || 1} s`);
      await this.wait(pause);
      pause = Math.min(pause * 2, LONGEST_PAUSE);
    }
  }

  open() {
    const headers = { Accept: "text/event-stream" };
    if (this.token) headers.Authorization = `Bearer ${this.token}`;
    if (this.last) headers["Last-Event-ID"] = this.last;
    return fetch(`/v1/events?replay=${REPLAYED}`, { headers, signal: this.stopped.signal, cache: "no-store" });
  }

  async read(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const silent = setTimeout(() => reader.cancel(), SILENCE);
      const { done, value } = await reader.read();
      clearTimeout(silent);
      if (done) return;
      rest += value;
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) this.handle(block);
    }
  }

  handle(block) {
    let kind = "message";
    let data = "";
    let id = "";
    for (const line of block.split("\n")) {
      if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
      else if (line.startsWith("id: ")) id = line.slice(4);
    }
    if (id) this.last = id;
    if (data) this.handlers.event(kind, JSON.parse(data));
  }

  // Wait, but not longer than until the browser says that the network is back.
  wait(milliseconds) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, milliseconds);
      addEventListener("online", () => (clearTimeout(timer), resolve()), { once: true });
      this.stopped.signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
    });
  }
}
