// Formats numbers, times and durations for people.

export const NONE = "–";

// The name of a job or of a run, whose id has a digest of its folder at the end.
export function jobName(id) {
  return id.replace(/^default\./, "").replace(/~[^~]*$/, "");
}

// A local batch: the samples of a micro-batch, and how many a step has if there are several.
export function localBatch({ local_bsz: samples, accumulation }) {
  return accumulation > 1 ? `${count(samples)} × ${accumulation}` : count(samples);
}

export function count(number) {
  return isMissing(number) ? NONE : Math.round(number).toLocaleString("en-US");
}

export function significant(number, digits = 3) {
  if (isMissing(number)) return NONE;
  if (number !== 0 && (Math.abs(number) >= 1e6 || Math.abs(number) < 1e-4)) return Number(number.toPrecision(digits)).toExponential();
  return Number(number.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 8 });
}

export function percent(fraction) {
  return isMissing(fraction) ? NONE : `${Math.round(100 * fraction)}%`;
}

export function duration(seconds) {
  if (isMissing(seconds)) return NONE;
  const whole = Math.max(Math.round(seconds), 0);
  const days = Math.floor(whole / 86400), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60);
  if (whole < 60) return `${whole} s`;
  if (hours < 1) return `${minutes} min ${whole % 60} s`;
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${days} d ${hours % 24} h`;
}

export function clock(seconds, { withSeconds = true, withDate = false } = {}) {
  const date = new Date(seconds * 1000);
  const time = date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: withSeconds ? "2-digit" : undefined });
  const year = date.getFullYear() === new Date().getFullYear() ? "" : `${date.getFullYear()}-`;
  return withDate ? `${year}${two(date.getMonth() + 1)}-${two(date.getDate())} ${time}` : time;
}

function two(number) {
  return String(number).padStart(2, "0");
}

export function isMissing(number) {
  return number === null || number === undefined || !Number.isFinite(number);
}
