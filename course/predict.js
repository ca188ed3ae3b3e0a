// Shows a question of predict.py as a form of native elements, which have their keys, names and states from the browser.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Text in `backticks` is code.
const inWords = (text) => text.split("`").map((part, i) => (i % 2 ? element("code", {}, part) : part));

// In a field of type number, browsers make 25 of "2,5".
const DECIMAL = {
  type: "text", inputmode: "decimal", pattern: "\\s*[+\\-]?(\\d+\\.?\\d*|\\.\\d+)([eE][+\\-]?\\d+)?\\s*",
  title: "Write a number with a point and without commas: 2.5, 1024 or 1e9.",
};

// Each kind: how its answer is put in and read, in the form in which Python keeps it.
const KINDS = {
  number(place, { unit }) {
    const input = element("input", { ...DECIMAL, required: "", "aria-label": unit ? `answer in ${unit}` : "answer" });
    place.append(input, unit);
    return { read: () => Number(input.value), put: (answer) => { input.value = answer; } };
  },

  choice(place, { words, name }) {
    const inputs = words.map((word) => element("input", { type: "radio", name, value: word, required: "" }));
    place.append(...inputs.map((input) => element("label", {}, input, " ", ...inWords(input.value))));
    const put = (answer) => inputs.forEach((input) => { input.checked = input.value === answer; });
    return { read: () => inputs.find((input) => input.checked).value, put };
  },

  order(place, { words }) {
    const list = element("ol"), moved = element("span", { class: "moved", "aria-live": "polite" });
    const mark = () => [...list.children].forEach((item, i) => {
      const [up, down] = item.querySelectorAll("button");
      up.setAttribute("aria-disabled", i === 0);  // not disabled: that would drop the focus
      down.setAttribute("aria-disabled", i === words.length - 1);
    });
    const move = (item, step, button) => {
      const other = step < 0 ? item.previousElementSibling : item.nextElementSibling;
      if (!other) return;
      list.insertBefore(...(step < 0 ? [item, other] : [other, item]));
      mark();
      button.focus();
      moved.textContent = `${item.dataset.word} is now number ${[...list.children].indexOf(item) + 1}.`;
    };
    const row = (word) => {
      const item = element("li", { "data-word": word }, word);
      for (const [sign, where, step] of [["▲", "up", -1], ["▼", "down", 1]]) {
        const button = element("button", { type: "button", "aria-label": `Move ${word} ${where}` }, sign);
        button.addEventListener("click", () => move(item, step, button));
        item.append(button);
      }
      return item;
    };
    const put = (answer) => {
      list.replaceChildren(...answer.map(row));
      moved.textContent = "";
      mark();
    };
    put(words);
    place.append(list, moved);
    return { read: () => [...list.children].map((item) => item.dataset.word), put };
  },
};

function render({ model, el }) {
  el.classList.add("labkit-predict");
  // Else JupyterLab takes the keys as its own.
  el.addEventListener("focusin", ({ target }) => target.setAttribute("data-lm-suppress-shortcuts", "true"));
  const question = element("legend");
  question.innerHTML = `<b>Predict.</b> ${model.get("text")}`;
  const place = element("div", { class: "answer" }), send = element("button", { type: "submit" });
  const status = element("div", { class: "status", role: "status" });
  const form = element("form", {}, element("fieldset", {}, question, place, send, status));
  const name = `labkit-${Math.random().toString(36).slice(2)}`;
  const { read, put } = KINDS[model.get("kind")](place, { words: model.get("words"), unit: model.get("unit"), name });
  form.addEventListener("keydown", (event) => {  // JupyterLab keeps Enter from doing this by itself
    if (event.key !== "Enter" || event.shiftKey || event.target.tagName !== "INPUT") return;
    event.preventDefault();
    form.requestSubmit();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    model.set("answer", read());
    model.save_changes();
  });

  const answered = () => model.get("answer") !== null && put(model.get("answer"));
  function judged() {
    const [state, word, sentence] = model.get("feedback");
    send.textContent = state && state !== "late" ? "Answer again" : "Keep my answer";
    status.dataset.status = state ?? "";
    status.replaceChildren(...(state ? [element("b", {}, word), ...inWords(sentence)] : []));
  }
  model.on("change:answer", answered);
  model.on("change:feedback", judged);
  answered();
  judged();
  el.append(form);
  return () => {
    model.off("change:answer", answered);
    model.off("change:feedback", judged);
  };
}

export default { render };
