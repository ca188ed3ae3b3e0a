// Makes the explorers of a page live. Python runs in worker.js; stage.js and choice.js draw, as they do in Jupyter.
// The page has what Python answers first, so an explorer is drawn at once. Until Python answers its controls are off.

import choice from "./choice.js";
import { Model, element, same } from "./model.js";
import stage from "./stage.js";

const REST = 300;  // milliseconds after the last change: then the address says what is shown, and can be sent
const PHONE = "(max-width: 600px)";
const NEAR = "300px";  // Python starts when an explorer is so close to the screen

// -- Python, one for all views of a page
const STARTS = "Python is starting in this page …";
const FAILED = "Python did not start in this browser. The pictures stay as they were stored.";
let worker = null, hasFailed = false;
function python() {
  if (worker) return worker;
  worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  worker.addEventListener("message", ({ data: [key, answer] }) => views.get(key).show(answer));
  worker.addEventListener("error", () => {
    hasFailed = true;
    for (const view of views.values()) if (view.isAwake) view.say(FAILED);
  });
  return worker;
}

class View {
  constructor(place) {
    this.place = place;
    this.key = place.dataset.view;
    this.waiting = [];  // what is to be asked when Python has answered
    this.address = {};
    const first = JSON.parse(place.dataset.first), { narrow, screen } = place.dataset;
    this.isPhone = !screen && matchMedia(PHONE).matches;  // a slide is one on a phone, too
    this.screen = this.isPhone ? "phone" : screen ?? "";
    if (this.isPhone && narrow) first.stage.steps = JSON.parse(narrow);
    this.build(first);
  }
  get isAwake() { return "busy" in this; }

  wake(words = {}) {
    if (this.isAwake) return;
    this.busy = null;
    this.copied.textContent = STARTS;
    this.ask("make", [this.place.dataset.explorer, ...JSON.parse(this.place.dataset.values), this.screen]);
    if (Object.keys(words).length) this.ask("restore", words);
  }

  // A control that is dragged asks more often than Python answers: only its last place counts.
  ask(method, given = null) {
    if (hasFailed) return this.say(FAILED);
    if (!this.isAwake) this.wake();  // the picture was touched before the explorer was seen
    const last = this.waiting.at(-1);
    if (last?.ask === "choose" && method === "choose") Object.assign(last.with, given);
    else this.waiting.push({ view: this.key, ask: method, with: given });
    if (method !== "hints") this.place.setAttribute("aria-busy", true);
    this.go();
  }

  go() {
    if (this.busy || !this.waiting.length) return;
    this.busy = this.waiting.shift();
    python().postMessage(this.busy);
  }

  show({ error, looks, stage: picture, controls, says, facts, address, cell }) {
    const { ask } = this.busy;
    this.busy = null;
    if (ask === "make") this.copied.textContent = "";
    if (error) this.say(error);
    for (const [name, values] of Object.entries(controls ?? {})) {
      for (const [each, value] of Object.entries(values)) {
        const model = this.models[name];
        if (!same(model.get(each), value)) model.set(each, value);
      }
    }
    if (picture && !looks) for (const [name, value] of Object.entries(picture)) this.picture.set(name, value);
    if (says !== undefined) {
      this.note.hidden = true;
      [this.says.innerHTML, this.facts.innerHTML, this.cell.textContent] = [says, facts, cell];
      this.address = address;
      rest(ask !== "make" && ask !== "restore");
      if (!this.waiting.length) this.ask("hints");
    }
    if (!this.waiting.length) this.place.removeAttribute("aria-busy");
    this.go();
  }

  say(text) {
    this.busy = null;
    this.place.removeAttribute("aria-busy");
    this.copied.textContent = "";
    this.note.textContent = text;
    this.note.hidden = false;
  }

  build({ looks, groups, stage: picture, controls, says, facts, cell }) {
    const boxes = {};
    this.models = {};
    for (const [name, look] of Object.entries(looks)) {
      this.models[name] = new Model({ ...look, ...controls[name], disabled: true }, ({ index }) => this.ask("choose", { [name]: index }));
      boxes[name] = element("div", { "data-name": name });
      choice.render({ model: this.models[name], el: boxes[name] });
    }
    const grouped = Object.entries(groups).map(([title, names]) => {
      const head = element("div", { class: "widget-html" }, element("b", {}, title));
      return element("div", { class: "labkit-group" }, head, ...names.map((name) => boxes[name]));
    });
    const row = element("div", { class: "widget-box" }, ...(grouped.length ? grouped : Object.values(boxes)));
    const below = (message) => this.ask(...Object.entries(message)[0]);
    this.picture = new Model(picture, null, below);
    const drawing = element("div");
    [this.says, this.facts] = [0, 1].map(() => element("div", { class: "widget-html" }));
    this.cell = element("pre", { hidden: "", tabindex: 0, "aria-label": "the cell" });
    const copy = element("button", { type: "button" }, "Copy as a cell");
    this.copied = element("span", { role: "status" });
    this.note = element("p", { class: "labkit-note", role: "status", hidden: "" });
    [this.says.innerHTML, this.facts.innerHTML, this.cell.textContent] = [says, facts, cell];
    copy.addEventListener("click", async () => {
      this.cell.hidden = false;
      const done = await navigator.clipboard?.writeText(this.cell.textContent).then(() => true, () => false);
      this.copied.textContent = done ? "Copied: paste it into a notebook of the lab." : "This cell shows the same in the lab:";
    });
    const rest = [this.facts, element("p", { class: "labkit-copy" }, copy, " ", this.copied), this.cell];
    // On a telephone, the picture comes first, and stays in view: see choice.css.
    const first = this.isPhone ? [drawing, this.note, this.says, row] : [row, this.note, this.says, drawing];
    this.place.replaceChildren(...first, ...rest);
    this.place.classList.add("labkit-explorer");
    stage.render({ model: this.picture, el: drawing });
  }
}

const views = new Map([...document.querySelectorAll("[data-explorer]")].map((place) => [place.dataset.view, new View(place)]));

// -- the address: #t=8&p=4, or #layout.t=8&layout.p=4 where a page has several explorers
const prefix = (view) => (views.size > 1 ? `${view.key}.` : "");
let resting = null;

function rest(wasMoved) {
  clearTimeout(resting);
  resting = setTimeout(() => {
    dispatchEvent(new Event("resize"));  // what scrolls may be new: see wake.js
    const said = new URLSearchParams();
    for (const view of views.values()) for (const [name, word] of Object.entries(view.address)) said.set(prefix(view) + name, word);
    if (wasMoved && `${said}` !== location.hash.slice(1)) history.pushState(null, "", `#${said}`);
  }, REST);
}

function readAddress() {
  const said = location.hash.slice(1);
  if (said && !said.includes("=")) return [];  // it leads to a heading
  const all = [...new URLSearchParams(said)];
  return [...views.values()].filter((view) => {
    const own = all.filter(([name]) => name.startsWith(prefix(view)) && (prefix(view) || !name.includes(".")));
    const words = Object.fromEntries(own.map(([name, word]) => [name.slice(prefix(view).length), word]));
    if (view.isAwake && !same(view.address, words)) view.ask("restore", words);
    else if (!view.isAwake && own.length) view.wake(words);
    return own.length;
  });
}

addEventListener("popstate", readAddress);
readAddress()[0]?.place.scrollIntoView();

const near = new IntersectionObserver((seen) => {
  for (const { isIntersecting, target } of seen) if (isIntersecting) views.get(target.dataset.view).wake();
}, { rootMargin: NEAR });
for (const view of views.values()) near.observe(view.place);
