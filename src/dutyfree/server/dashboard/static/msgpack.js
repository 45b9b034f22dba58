// MessagePack, as far as the channel of a terminal needs it.

const text = new TextEncoder();

export function encode(value) {
  const out = [];
  write(out, value);
  return Uint8Array.from(out);
}

function length(out, size, fixed, limit, wide) {
  if (size < limit) out.push(fixed | size);
  else if (size < 0x10000) out.push(wide, size >> 8, size & 0xff);
  else throw new RangeError("too long");
}

function write(out, value) {
  if (value === null || value === undefined) out.push(0xc0);
  else if (typeof value === "boolean") out.push(value ? 0xc3 : 0xc2);
  else if (typeof value === "number") {
    if (value >= 0 && value < 128) out.push(value);
    else out.push(0xce, (value >>> 24) & 0xff, (value >>> 16) & 0xff, (value >>> 8) & 0xff, value & 0xff);
  } else if (typeof value === "string") {
    const bytes = text.encode(value);
    length(out, bytes.length, 0xa0, 32, 0xda);
    for (const byte of bytes) out.push(byte);
  } else if (value instanceof Uint8Array) {
    length(out, value.length, 0, 0, 0xc5);
    for (const byte of value) out.push(byte);
  } else if (Array.isArray(value)) {
    length(out, value.length, 0x90, 16, 0xdc);
    for (const part of value) write(out, part);
  } else {
    const entries = Object.entries(value);
    length(out, entries.length, 0x80, 16, 0xde);
    for (const [name, part] of entries) {
      write(out, name);
      write(out, part);
    }
  }
}

export function decode(bytes) {
  return new Decoder(bytes).value();
}

class Decoder {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.at = 0;
  }

  take(size) {
    if (this.at + size > this.bytes.length) throw new RangeError("cut off");
    this.at += size;
    return this.at - size;
  }

  number(size) {
    const at = this.take(size);
    return size === 1 ? this.view.getUint8(at) : size === 2 ? this.view.getUint16(at) : this.view.getUint32(at);
  }

  raw(size) {
    const at = this.take(size);
    return this.bytes.subarray(at, at + size);
  }

  string(size) {
    return new TextDecoder().decode(this.raw(size));
  }

  array(size) {
    return Array.from({ length: size }, () => this.value());
  }

  map(size) {
    const found = new Map();
    for (let index = 0; index < size; index += 1) found.set(this.value(), this.value());
    return Object.fromEntries(found);
  }

  value() {
    const type = this.number(1);
    if (type < 0x80) return type;
    if (type >= 0xe0) return type - 0x100;
    if (type < 0x90) return this.map(type & 0x0f);
    if (type < 0xa0) return this.array(type & 0x0f);
    if (type < 0xc0) return this.string(type & 0x1f);
    switch (type) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: case 0xc5: case 0xc6: return this.raw(this.number(1 << (type - 0xc4)));
      case 0xc7: case 0xc8: case 0xc9: { const size = this.number(1 << (type - 0xc7)); this.take(1); return this.string(size); }
      case 0xca: return this.view.getFloat32(this.take(4));
      case 0xcb: return this.view.getFloat64(this.take(8));
      case 0xcc: case 0xcd: case 0xce: return this.number(1 << (type - 0xcc));
      case 0xcf: return Number(this.view.getBigUint64(this.take(8)));
      case 0xd0: return this.view.getInt8(this.take(1));
      case 0xd1: return this.view.getInt16(this.take(2));
      case 0xd2: return this.view.getInt32(this.take(4));
      case 0xd3: return Number(this.view.getBigInt64(this.take(8)));
      case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8: this.take(1); return this.string(1 << (type - 0xd4));
      case 0xd9: case 0xda: case 0xdb: return this.string(this.number(1 << (type - 0xd9)));
      case 0xdc: case 0xdd: return this.array(this.number(type === 0xdc ? 2 : 4));
      case 0xde: case 0xdf: return this.map(this.number(type === 0xde ? 2 : 4));
      default: throw new RangeError(`no type ${type}`);
    }
  }
}
