// The cursor that all charts of the last ten minutes share: a Unix time, or null where there is none.

const followers = [];

export function follow(show) {
  followers.push(show);
}

export function moveCursor(time) {
  for (const show of followers) show(time);
}

/** Sizes that charts and heat maps share, so that their edges are aligned. */
export const LEFT = 64;
export const RIGHT = 14;
export const SPAN = 600;
