// Texts of numbers: "–" is not known, 0 is zero. A quantity has one unit everywhere.

export const UNKNOWN = "–";
const THIN_SPACE = "\u202f";

/** A count: 950, 12 345, 4.5M. */
export function count(number) {
  if (number === null || number === undefined) return UNKNOWN;
  if (Math.abs(number) >= 999_999.5) return `${(number / 1e6).toFixed(1)}M`;
  const text = number >= 10 || Number.isInteger(number) ? number.toFixed(0) : number.toFixed(1);
  return text.replace(/\B(?=(\d{3})+$)/g, THIN_SPACE);
}

/** A duration with its unit: 0.85 ms, 12.5 ms, 1.25 s, 3 min, 2.5 h. */
export function seconds(number) {
  if (number === null || number === undefined) return UNKNOWN;
  if (number === 0) return "0 s";
  if (number < 5e-6) return "< 0.01 ms";
  if (number < 0.9995) return `${digits(number * 1e3)} ms`;
  if (number < 99.95) return `${digits(number)} s`;
  return longer(number);
}

/** A duration as short as it can be exactly, for axes and bounds: 10 ms, 2.5 s. */
export function tick(number) {
  return number ? seconds(number).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ") : "0";
}

/** An age or another long time, in whole seconds. */
export function age(number) {
  if (number === null || number === undefined) return UNKNOWN;
  return number < 99.5 ? `${number.toFixed(0)} s` : longer(number);
}

const digits = number => (number < 0.995 ? number.toFixed(2) : number.toPrecision(3));
const longer = number => (number < 7200 ? `${(number / 60).toFixed(0)} min` : `${(number / 3600).toFixed(1)} h`);

/** A share as percentage. */
export function share(number) {
  if (number === null || number === undefined) return UNKNOWN;
  return `${(number * 100).toFixed(number !== 0 && Math.abs(number) < 0.0995 ? 1 : 0)} %`;
}

export function bytes(number) {
  return number < 2 ** 30 ? `${(number / 2 ** 20).toFixed(0)} MiB` : `${(number / 2 ** 30).toFixed(1)} GiB`;
}

/** The time of day of a Unix time. */
export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString([], { hour12: false });
}
