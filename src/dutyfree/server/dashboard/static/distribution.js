// Times over a sliding window: counts in logarithmic bins, in slices of ten seconds.

export const LOW = -6; // 1 µs
export const HIGH = 3; // 1,000 s
const PER_DECADE = 20;
const BINS = (HIGH - LOW) * PER_DECADE;
const SLICE = 10; // seconds

export class Distribution {
  constructor(window) {
    this.window = window;
    this.slices = new Map();
  }

  add(at, seconds) {
    const slice = Math.floor(at / SLICE);
    let counts = this.slices.get(slice);
    if (!counts) {
      counts = new Uint32Array(BINS);
      this.slices.set(slice, counts);
      for (const old of this.slices.keys()) if (old < slice - this.window / SLICE - 1) this.slices.delete(old);
    }
    const bin = Math.floor((Math.log10(Math.max(seconds, 1e-6)) - LOW) * PER_DECADE);
    counts[Math.min(Math.max(bin, 0), BINS - 1)] += 1;
  }

  // The counts of the window that ends now.
  total(now) {
    const sum = new Float64Array(BINS);
    const first = Math.floor((now - this.window) / SLICE);
    let count = 0;
    for (const [slice, counts] of this.slices) {
      if (slice < first) continue;
      for (let bin = 0; bin < BINS; bin += 1) {
        sum[bin] += counts[bin];
        count += counts[bin];
      }
    }
    return { counts: sum, count };
  }
}

// The time below which this share of the counts lies.
export function quantile({ counts, count }, share) {
  if (!count) return null;
  let rest = count * share;
  for (let bin = 0; bin < counts.length; bin += 1) {
    if (counts[bin] && rest <= counts[bin]) return 10 ** (LOW + (bin + rest / counts[bin]) / PER_DECADE);
    rest -= counts[bin];
  }
  return 10 ** HIGH;
}

// Heights between two powers of ten, smoothed over neighbours, the highest being 1.
export function outline({ counts }, low, high) {
  const from = (low - LOW) * PER_DECADE;
  const to = (high - LOW) * PER_DECADE;
  const heights = [];
  for (let bin = from; bin < to; bin += 1) {
    let sum = 0;
    for (let near = -2; near <= 2; near += 1) sum += (counts[bin + near] ?? 0) * [6, 4, 1][Math.abs(near)];
    heights.push(sum);
  }
  heights[0] += counts.slice(0, from).reduce((one, other) => one + other, 0);
  heights[heights.length - 1] += counts.slice(to).reduce((one, other) => one + other, 0);
  const most = Math.max(...heights, 1e-9);
  return heights.map((height) => height / most);
}
