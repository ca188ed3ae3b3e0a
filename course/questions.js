// Asks the questions of a page: an answer is compared with the result that was stored with the notebook, as predict.py
// does it, and kept in this browser, in the form of the lab's own record. Nothing is sent anywhere.

import { Model, same } from "./model.js";
import predict from "./predict.js";

const KEPT = "megatron-lab";

function read() {
  try {
    return { predictions: {}, results: {}, ...JSON.parse(localStorage.getItem(KEPT)) };
  } catch {
    return { predictions: {}, results: {} };
  }
}

function keep(part, key, value) {
  const all = read();
  all[part][key] = value;
  try {
    localStorage.setItem(KEPT, JSON.stringify(all));
    return "";
  } catch {
    return "This browser keeps no answers: it is forgotten with this page.";
  }
}

const KINDS = {
  number: {
    isSame: (answer, other, { tolerance }) => Array.isArray(other) ? other[0] < answer && answer < other[1]
      : Math.abs(answer - other) <= tolerance * Math.abs(other),
    said: (answer, { unit }) => `${answer.toLocaleString("en")} ${unit}`.trim(),
    nearness: (answer, { result }) => `That is too ${answer > result ? "large" : "small"}.`,
  },
  choice: { isSame: same, said: String, nearness: () => "" },
  order: {
    isSame: same,
    said: (answer) => answer.join(", "),
    nearness: (answer, { result }) => `In the right place: ${answer.filter((each, i) => each === result[i]).length} of ${result.length}.`,
  },
};

function feedback(question, kept, isLate) {
  const { isSame, said, nearness } = KINDS[question.kind], { result } = question;
  if (!kept) return isLate ? ["late", "○ the result is known", "You may still answer, but it does not count as a prediction."] : [];
  const late = kept.right === null ? " It came after the result, so it does not count as a prediction." : "";
  if (isSame(kept.last, result, question)) {
    const earlier = isSame(kept.first, result, question) ? "" : `Your first answer was: ${said(kept.first, question)}.`;
    return ["passed", "✓ correct", (earlier + late).trim()];
  }
  const advice = mistake(question, kept.last) ?? nearness(kept.last, question);
  return ["wrong", "✗ not right yet", `${advice} Compare with the result below, or try again.${late}`.trim()];
}

function mistake(question, answer) {
  return question.wrong.find(([each]) => KINDS[question.kind].isSame(answer, each, question))?.[1] ?? null;
}

for (const place of document.querySelectorAll("[data-question]")) {
  const question = JSON.parse(place.dataset.question), { key, kind, result } = question;
  const results = document.querySelectorAll(`[data-answers="${key}"]`), now = () => new Date().toISOString();
  let kept = read().predictions[key];
  if (kept?.kind !== kind) kept = null;
  const judged = () => feedback(question, kept, key in read().results);
  const answered = ({ answer }) => {
    if (!kept) {
      const right = key in read().results ? null : KINDS[kind].isSame(answer, result, question);
      kept = { kind, first: answer, time: now(), right, mistake: right === false ? mistake(question, answer) : null, last: null, tries: 0 };
    }
    if (!same(kept.last, answer)) kept = { ...kept, last: answer, tries: kept.tries + 1 };
    const notKept = keep("predictions", key, kept), [state, word, sentence] = judged();
    model.set("feedback", [state, word, `${sentence} ${notKept}`.trim()]);
    for (const each of results) each.open = true;
  };
  const model = new Model({ ...question, answer: kept?.last ?? null, feedback: judged() }, answered);
  place.replaceChildren();
  predict.render({ model, el: place });
  for (const each of results) {
    each.open = Boolean(kept);
    each.addEventListener("toggle", () => {
      if (!each.open || key in read().results) return;
      keep("results", key, now());
      model.set("feedback", judged());
    });
  }
}
