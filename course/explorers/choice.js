// Shows a control of choice.py as a native element: the browser gives it its keys, its name and its state.

function element(tag, attributes = {}, ...children) {
  const one = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
  one.append(...children);
  return one;
}

// An option that does not fit says beforehand what it would change; it can be chosen all the same.
function mark(one, hint, seen = one) {
  if (!hint) return;
  one.setAttribute("aria-description", hint);
  one.title = seen.title = hint;
  seen.classList.add("gives-way");
}

function render({ model, el }) {
  el.classList.add("labkit-choice");
  // Otherwise JupyterLab would take the arrow keys for itself.
  el.addEventListener("focusin", ({ target }) => target.setAttribute("data-lm-suppress-shortcuts", "true"));
  const choose = (index) => {
    if (index === model.get("index")) return;
    model.set("index", index);
    model.save_changes();
  };

  function draw() {
    const [words, index, name, hints] = ["words", "index", "description", "hints"].map((each) => model.get(each));
    const had = el.contains(document.activeElement) ? document.activeElement.dataset.index ?? "" : null;
    const id = `labkit-${Math.random().toString(36).slice(2)}`, label = element("label", { for: id }, name);
    const look = model.get("look");
    el.dataset.look = look;
    if (look === "slider") {
      const input = element("input", { id, type: "range", min: 0, max: words.length - 1, value: index });
      const shown = element("output", { for: id });
      const say = () => {
        shown.textContent = words[input.value];
        input.setAttribute("aria-valuetext", words[input.value]);
      };
      input.addEventListener("input", () => (say(), choose(Number(input.value))));
      say();
      el.replaceChildren(label, input, shown);
    } else if (look === "menu") {
      const input = element("select", { id }, ...words.map((word, i) => element("option", {}, hints[i] ? `${word} (${hints[i]})` : word)));
      input.style.width = `${Math.max(...words.map((word) => word.length)) + 4}ch`;  // whatever the hints say
      input.selectedIndex = index;
      input.addEventListener("change", () => choose(input.selectedIndex));
      el.replaceChildren(label, input);
    } else if (look === "checkbox") {
      const input = element("input", { id, type: "checkbox" });
      input.checked = index === 1;
      input.addEventListener("change", () => choose(Number(input.checked)));
      mark(input, hints[1 - index], label);
      el.replaceChildren(input, label);
    } else {
      const each = words.map((word, i) => {
        const one = element("button", { type: "button", "aria-pressed": i === index, "data-index": i }, word);
        one.addEventListener("click", () => choose(i));
        mark(one, hints[i]);
        return one;
      });
      el.replaceChildren(element("span", { id }, name), element("span", { role: "group", "aria-labelledby": id }, ...each));
    }
    for (const input of el.querySelectorAll("input, select, button")) input.disabled = model.get("disabled");
    if (had !== null) el.querySelector(had ? `[data-index="${had}"]` : "input, select")?.focus();
  }

  // What one more and one less would lead to stands where the picture says its facts.
  let said = "";
  const placeOfFacts = () => el.closest(".labkit-explorer")?.querySelector(".fact");
  function tell() {
    const [hints, index, name] = ["hints", "index", "description"].map((each) => model.get(each)), place = placeOfFacts();
    const both = [["one less", hints[index - 1]], ["one more", hints[index + 1]]].filter(([, hint]) => hint);
    if (model.get("look") !== "slider" || !both.length || !place) return;
    said = `${name}: ${both.map((each) => each.join(", ")).join("; ")}.`;
    if (place.textContent !== said) place.textContent = said;
  }
  function untell() {
    if (!said || el.contains(document.activeElement)) return;
    const place = placeOfFacts();
    if (place?.textContent === said) place.textContent = "";  // else the next control says its own
    said = "";
  }
  for (const name of ["pointerenter", "focusin"]) el.addEventListener(name, tell);
  for (const name of ["pointerleave", "focusout"]) el.addEventListener(name, () => setTimeout(untell));

  const events = ["index", "disabled", "hints"].map((name) => `change:${name}`).join(" ");
  const moved = () => {  // a slider that is being dragged must stay the same element
    const input = el.querySelector("input[type=range]");
    if (!input || Number(input.value) !== model.get("index")) draw();
    else for (const each of el.querySelectorAll("input")) each.disabled = model.get("disabled");
    if (said) tell();
  };
  const hide = () => el.classList.toggle("labkit-hidden", model.get("hidden"));
  model.on(events, moved);
  model.on("change:hidden", hide);
  draw();
  hide();
  return () => (model.off(events, moved), model.off("change:hidden", hide));
}

export default { render };
