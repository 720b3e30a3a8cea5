// Elements of the page; data only ever becomes text.

export const byId = id => document.getElementById(id);

/** Make an element with attributes and children, which are elements or texts. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Set a text only if it differs, so that selections and screen readers are not disturbed. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setClass(element, name) {
  if (element.className !== name) element.className = name;
}

/** Show pairs of a term and a text in a list of definitions. */
export function setFacts(list, facts) {
  while (list.children.length > facts.length) list.lastElementChild.remove();
  facts.forEach(([term, text], index) => {
    if (list.children.length <= index) list.append(make("div", {}, make("dt"), make("dd")));
    setText(list.children[index].firstElementChild, term);
    setText(list.children[index].lastElementChild, text);
  });
}

/** Call `draw` with a value only if it differs from the last one. */
export function onChange(draw) {
  let shown = "";
  return (...values) => {
    const key = JSON.stringify(values);
    if (key === shown) return;
    shown = key;
    draw(...values);
  };
}

const END = 10;

/** Make a link to an engine; a name that is too long loses its middle, since its end tells replicas apart. */
export function engineLink(id, name) {
  const link = make("a", { class: "name", href: `#engine=${encodeURIComponent(id)}` });
  setName(link, id, name);
  return link;
}

export function setName(link, id, name) {
  if (link.textContent === name && link.title === id) return;
  link.title = id;
  const parts = name.length > 2 * END ? [name.slice(0, -END), name.slice(-END)] : [name];
  link.replaceChildren(...parts.map(part => make("span", {}, part)));
}

const THEMES = ["system", "light", "dark"];
const redraws = [];

/** Call `draw` when colours change: what is drawn on a canvas takes them when it is made. */
export function onTheme(draw) {
  redraws.push(draw);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  setText(byId("theme"), `Theme: ${theme}`);
  for (const draw of redraws) draw();
}

/** Follow the theme button, whose choice this browser remembers. */
export function startTheme() {
  const known = localStorage.getItem("theme");
  setTheme(THEMES.includes(known) ? known : THEMES[0]);
  byId("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    localStorage.setItem("theme", next);
    setTheme(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach(draw => draw()));
}

const probe = make("span", { hidden: "" });

/** Return the value of a colour of the style sheet, in the present theme. */
export function colour(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}
