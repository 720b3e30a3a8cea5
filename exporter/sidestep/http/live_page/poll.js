// Requests that repeat while the page is visible and not paused.

const TIMEOUT = 10_000;
let paused = false;
const ticks = [];

/** The answer is an HTTP error. */
export class Refused extends Error {
  constructor(status) {
    super(`HTTP ${status}`);
    this.status = status;
  }
}

async function get(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(TIMEOUT), cache: "no-store" });
  if (!answer.ok) throw new Refused(answer.status);
  return answer.json();
}

/** Stop all requests, or go on at once. */
export function pause(isPaused) {
  paused = isPaused;
  for (const tick of ticks) tick();
}

export const isPolling = () => !paused && !document.hidden;

/**
 * Request `path()` every `interval` milliseconds, and at once when `again()` is called; nothing
 * where it is null. An answer to an earlier path is dropped.
 */
export function poll(path, interval, onAnswer, onError = () => {}) {
  let timer = 0;
  let latest = 0;
  async function request() {
    clearTimeout(timer);
    const number = ++latest;
    const asked = path();
    try {
      const answer = asked === null ? null : await get(asked);
      if (number === latest && answer !== null) onAnswer(answer);
    } catch (error) {
      if (number === latest) onError(error);
    }
    if (number === latest) timer = setTimeout(tick, interval);
  }
  function tick() {
    if (isPolling()) request();
  }
  ticks.push(tick);
  document.addEventListener("visibilitychange", tick);
  request();
  return { again: request };
}
