// One terminal over the server's channel: a WebSocket with the frames that wire/frames.py describes.

import { decode, encode } from "./msgpack.js";

const CALL = 0;
const ITEM = 2;
const END = 3;
const CREDIT = 4;
const RESULT = 5;
const ERROR = 6;
const MORE = 0x80;
const NUMBER = 1; // of the only call
const ITEM_COST = 64;
const WINDOW = 1 << 20;
const CHUNK = 16 << 10;

export class TerminalChannel {
  // `handlers`: data(bytes), opened(), ended(message).
  constructor(sandbox, size, token, handlers) {
    this.handlers = handlers;
    this.credit = WINDOW;
    this.queue = [];
    this.parts = [];
    this.over = false;
    // A browser cannot send a header with a WebSocket, so the token goes as a subprotocol.
    const protocols = ["dutyfree.v1", ...(token ? [`dutyfree.token.${token}`] : [])];
    const address = new URL("/v1/channel", location.href);
    address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
    this.socket = new WebSocket(address, protocols);
    this.socket.binaryType = "arraybuffer";
    this.socket.onopen = () => {
      this.send(CALL, encode(["terminal", sandbox, { rows: size.rows, columns: size.columns, env: { TERM: "xterm-256color" } }]));
    };
    this.socket.onmessage = (message) => this.receive(new Uint8Array(message.data));
    this.socket.onclose = (event) => this.finish(event.reason || "the connection was lost");
  }

  send(kind, payload = new Uint8Array()) {
    if (this.socket.readyState !== WebSocket.OPEN) return;
    const frame = new Uint8Array(5 + payload.length);
    const view = new DataView(frame.buffer);
    view.setUint8(0, kind);
    view.setUint32(1, NUMBER, true);
    frame.set(payload, 5);
    this.socket.send(frame);
  }

  receive(frame) {
    const payload = frame.subarray(5);
    if (frame[0] & MORE) {
      this.parts.push(payload);
      return;
    }
    const whole = this.parts.length ? joined([...this.parts, payload]) : payload;
    this.parts = [];
    switch (frame[0]) {
      case ITEM: {
        const credit = new Uint8Array(4);
        new DataView(credit.buffer).setUint32(0, whole.length + ITEM_COST, true);
        this.send(CREDIT, credit);
        if (whole.length) this.handlers.data(whole);
        else this.handlers.opened(); // the first item is empty
        break;
      }
      case CREDIT:
        this.credit += new DataView(whole.buffer, whole.byteOffset).getUint32(0, true);
        this.flush();
        break;
      case RESULT: {
        const seen = decode(whole);
        this.finish(seen.signal ? `ended by signal ${seen.signal}` : `ended with exit code ${seen.exit_code}`);
        break;
      }
      case ERROR:
        this.finish(decode(whole).message);
        break;
    }
  }

  type(text) {
    const bytes = new TextEncoder().encode(text);
    for (let at = 0; at < bytes.length; at += CHUNK) this.queue.push(encode({ data: bytes.subarray(at, at + CHUNK) }));
    this.flush();
  }

  resize(size) {
    this.queue.push(encode({ size: [size.rows, size.columns] }));
    this.flush();
  }

  flush() {
    while (this.queue.length && this.credit > this.queue[0].length + ITEM_COST) {
      const item = this.queue.shift();
      this.credit -= item.length + ITEM_COST;
      this.send(ITEM, item);
    }
  }

  finish(message) {
    if (this.over) return;
    this.over = true;
    this.handlers.ended(message);
    this.socket.close();
  }

  close() {
    this.over = true;
    this.send(END); // which ends the command
    this.socket.close();
  }
}

function joined(parts) {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}
