// Runs Python in a thread of its own, so that a page can be scrolled and its pictures move while an explorer computes.
// Passes on what page.js asks of a view, and what page.py answers.

import { loadPyodide } from "./pyodide.js";

async function start() {
  const [python, files] = await Promise.all([loadPyodide(), fetch("lab.zip").then((got) => got.arrayBuffer())]);
  python.FS.writeFile("/lab.zip", new Uint8Array(files));
  python.runPython("import sys; sys.path.insert(0, '/lab.zip')");
  return python.pyimport("course.explorers.page").answer;
}

const started = start();

addEventListener("message", async ({ data }) => {
  try {
    postMessage([data.view, JSON.parse((await started)(JSON.stringify(data)))]);
  } catch (error) {
    console.error(error);
    postMessage([data.view, { error: `Python stopped here: ${String(error.message).trim().split("\n").at(-1)}` }]);
  }
});
