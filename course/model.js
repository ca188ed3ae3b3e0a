// What anywidget gives to a widget in Jupyter, for a page without Jupyter; see page.js and questions.js.

export class Model extends EventTarget {
  constructor(state, save, send) {
    super();
    Object.assign(this, { state, send, save_changes: () => save(state) });
  }
  get(name) { return this.state[name]; }
  set(name, value) {
    this.state[name] = value;
    this.dispatchEvent(new Event(`change:${name}`));
  }
  on(names, call) { for (const name of names.split(" ")) this.addEventListener(name, call); }
  off(names, call) { for (const name of names.split(" ")) this.removeEventListener(name, call); }
}

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
