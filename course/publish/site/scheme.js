// Before anything is drawn: the scheme that the reader chose on these pages, or the system's.
(function () {
  var data = document.documentElement.dataset, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  try {
    data.mode = localStorage.getItem("mode") || "auto";
  } catch (error) {
    data.mode = "auto";
  }
  data.theme = data.mode === "auto" ? (dark ? "dark" : "light") : data.mode;
})();
