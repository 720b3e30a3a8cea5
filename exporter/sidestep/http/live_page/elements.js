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

/** Return the value of a colour of the style sheet. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
