// Texts of numbers: "–" is not known, 0 is zero.

export const UNKNOWN = "–";

/** A count: 950, 12.3k, 4.5M. */
export function count(number) {
  if (number === null || number === undefined) return UNKNOWN;
  const size = Math.abs(number);
  if (size >= 999_950) return `${(number / 1e6).toFixed(1)}M`;
  if (size >= 9_999.5) return `${(number / 1e3).toFixed(1)}k`;
  return size >= 10 || Number.isInteger(number) ? number.toFixed(0) : number.toFixed(1);
}

/** A duration with its unit: 850 µs, 12.5 ms, 1.25 s, 3 min, 2.5 h. */
export function seconds(number) {
  if (number === null || number === undefined) return UNKNOWN;
  if (number === 0) return "0 s";
  if (number < 0.001) return `${Number((number * 1e6).toPrecision(3))} µs`;
  if (number < 0.9995) return `${Number((number * 1e3).toPrecision(3))} ms`;
  if (number < 100) return `${Number(number.toPrecision(3))} s`;
  if (number < 7200) return `${(number / 60).toFixed(0)} min`;
  return `${(number / 3600).toFixed(1)} h`;
}

/** A share as percentage. */
export function share(number) {
  if (number === null || number === undefined) return UNKNOWN;
  return `${(number * 100).toFixed(number !== 0 && Math.abs(number) < 0.1 ? 1 : 0)} %`;
}

export function bytes(number) {
  return number < 2 ** 30 ? `${(number / 2 ** 20).toFixed(0)} MiB` : `${(number / 2 ** 30).toFixed(1)} GiB`;
}

/** The time of day of a Unix time. */
export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString([], { hour12: false });
}
