// Numbers as people read them: three digits, and a unit.

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value <= 0) return "0 s";
  if (value < 0.0000012) return "< 1 µs";
  if (value < 0.000995) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.00995) return `${(value * 1e3).toFixed(2)} ms`;
  if (value < 0.0995) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 0.9995) return `${(value * 1e3).toFixed(0)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 99.95) return `${value.toFixed(1)} s`;
  return duration(value);
}

export function duration(value) {
  const whole = Math.max(0, Math.floor(value));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function count(value) {
  return Math.round(value).toLocaleString("en");
}

export function rate(value) {
  if (value === 0) return "0";
  return value < 10 ? value.toFixed(1) : count(value);
}

export function percent(part, whole) {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  return share > 0 && share < 10 ? `${share.toFixed(1)} %` : `${Math.round(share)} %`;
}

// `precise`: how many digits of the fraction.
export function clock(unix, precise = 0) {
  const time = new Date(unix * 1000);
  const whole = time.toLocaleTimeString("en-GB");
  return precise ? `${whole}.${String(time.getMilliseconds()).padStart(3, "0").slice(0, precise)}` : whole;
}

export function plural(number, one, several = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : several}`;
}

// An id is long and random; its beginning is enough to tell it from others on a page.
export function shortId(id) {
  return id.startsWith("sb-") ? id.slice(0, 9) : id;
}
