// Says why explorers and questions stay as they were stored, where a browser cannot run them; else starts their views.
// It is written so that old browsers understand it.
(function () {
  var why = "";
  if (location.protocol === "file:") {
    why = "To move this, serve the pages: run python3 -m http.server in the folder of index.html, and open http://localhost:8000.";
  } else if (typeof WebAssembly !== "object" || !("noModule" in document.createElement("script"))) {
    why = "This browser is too old to run Python (it has no WebAssembly), so this stays as it was stored.";
  }
  var places = document.querySelectorAll(why ? "[data-explorer], [data-question]" : "[data-explorer]"), i;
  function start(name) {
    var script = document.createElement("script");
    script.type = "module";
    script.src = document.currentScript.src.replace("wake.js", name);
    document.head.appendChild(script);
  }
  if (!why && places.length) start("page.js");
  if (!why && document.querySelector("[data-question]")) start("questions.js");
  for (i = 0; why && i < places.length; i++) {
    var note = document.createElement("p");
    note.className = "labkit-note";
    note.textContent = why;
    places[i].appendChild(note);
  }

  // What is wider than its box scrolls: keys reach it there, and it says what it is.
  function reach() {
    var boxes = document.querySelectorAll("main, main :not(svg *)"), i;
    for (i = 0; i < boxes.length; i++) {
      var box = boxes[i];
      var scrolls = box.scrollWidth > box.clientWidth + 1 && /auto|scroll/.test(getComputedStyle(box).overflowX);
      if (!scrolls || box.hasAttribute("tabindex")) continue;
      box.tabIndex = 0;
      var hasTable = box.tagName === "TABLE" || box.querySelector("table");
      if (box.tagName !== "TABLE") box.setAttribute("role", "group");
      var what = box.querySelector("img, svg") ? "picture" : hasTable ? "table" : "text";
      box.setAttribute("aria-label", what + ": scrolls sideways");
    }
  }
  addEventListener("load", reach);
  addEventListener("resize", reach);
  addEventListener("toggle", reach, true);  // what was folded away
})();
