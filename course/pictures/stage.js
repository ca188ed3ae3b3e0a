// Shows the scenes of stage.py. A mark is an SVG group with a key; marks with the same key are moved and recoloured
// by CSS transitions, the others fade. Nothing here knows what a picture is about.

const REST = 2000;  // milliseconds: a mouse that rests dims nothing any longer
const NARROW = 600, NARROWEST = 0.73, MARGIN = 8;  // as in scene.py: a picture is shown no smaller
const MOST_MOVING = 160;  // marks: with more, a browser without a graphics card takes longer to move than to draw them

function scenes(steps) {
  const all = [];
  for (const step of steps) all.push({ ...all.at(-1), ...step, marks: { ...all.at(-1)?.marks, ...step.marks } });
  return all;
}

const journeyOf = (group, journeys) => (group.dataset.tags ?? "").split(" ").find((tag) => tag && journeys[tag]);

function parse(fragments, clicks, journeys) {
  const holder = element("div");
  holder.innerHTML = `<svg>${fragments.join("")}</svg>`;
  const groups = [...holder.firstChild.children];
  for (const group of groups) {
    const title = group.querySelector("title");  // the fact: said below the picture, not in a box over it
    if (!title) continue;
    group.setAttribute("aria-label", title.textContent);
    const { drag, drop, click } = group.dataset;
    group.setAttribute("role", drag || drop || (click && clicks) || journeyOf(group, journeys) ? "button" : "img");
    title.remove();
  }
  return groups;
}

// On a narrow screen, panels stand below each other: moves a mark there, and returns the view of all of them.
function stack(panels, group) {
  const [x, y] = group ? group.style.transform.match(/-?[\d.]+/g).map(Number) : [NaN, NaN];
  let width = 0, height = 0;
  for (const [left, top, wide, tall] of panels) {
    const inside = x >= left - MARGIN && x < left + wide && y >= top - MARGIN && y < top + tall - MARGIN;
    if (inside) group.style.transform = `translate(${x - left}px, ${y - top + height}px)`;
    width = Math.max(width, wide);
    height += tall;
  }
  return [-MARGIN, -MARGIN, width + 2 * MARGIN, height + 2 * MARGIN];
}

function morph(old, now) {
  for (const { name } of [...old.attributes]) {
    if (!now.hasAttribute(name) && name !== "tabindex" && name !== "class") old.removeAttribute(name);
  }
  for (const { name, value } of now.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const [before, after] = [[...old.children], [...now.children]];
  if (before.length !== after.length || before.some((child, i) => child.tagName !== after[i].tagName)) {
    old.replaceChildren(...after);
  } else if (after.length) {
    before.forEach((child, i) => morph(child, after[i]));
  } else if (old.textContent !== now.textContent) {
    old.textContent = now.textContent;
  }
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// The playhead of a scene with a clock: it says what each row does at its moment, and points to what is awaited.
function playhead(layer, marks, list) {
  const [line, awaited, handle] = layer.children;
  let clock = [], now = 0, found = [];
  function read(given) {  // where the marks stand, after each drawing
    clock = given ?? [];
    layer.style.display = clock.length ? "" : "none";
    if (clock.length) handle.setAttribute("tabindex", 0);
    else handle.removeAttribute("tabindex");
    found = [...(clock.length ? marks.querySelectorAll(":scope > [data-row]:not(.leaving)") : [])].map((group) => {
      const [x, y] = group.style.transform.match(/-?[\d.]+/g).map(Number), bar = group.firstElementChild;
      const full = (group.dataset.full ??= bar.getAttribute("width"));
      return { ...group.dataset, x, y, width: Number(full), height: Number(bar.getAttribute("height")), bar };
    });
    move(now);
  }
  function move(to) {
    now = Math.max(0, Math.min(1, to));
    const [left, right, top, bottom, end, unit] = clock, x = left + now * (right - left), rows = new Map();
    list.hidden = !clock.length;
    if (list.hidden) return;
    for (const mark of found.filter(({ name }) => name)) {
      if (!rows.has(mark.row)) rows.set(mark.row, []);
      if (mark.x <= x + 0.1 && x < mark.x + mark.width - 0.1) rows.get(mark.row).push(mark);
    }
    const last = (row) => found.filter((mark) => mark.row === row && mark.name && mark.x <= x && x < mark.x + mark.width + 1);
    let path = "";
    const texts = [...rows].map(([row, under]) => {
      const runs = under.length ? under : last(row).slice(-1), level = runs.find((mark) => mark.level)?.level;
      for (const bar of found.filter((mark) => mark.row === row && !mark.name)) {
        bar.bar.setAttribute("width", bar.width * (level ?? 0) / (Number(bar.level) || 1));
      }
      for (const from of runs) {
        for (const to of found.filter(({ key }) => from.awaits?.split(" ").includes(key))) {
          path += arrowPath(x, from.y + from.height / 2, Math.max(to.x, Math.min(x, to.x + to.width)), to.y + to.height / 2);
        }
      }
      const holds = level === undefined ? "" : ` · holds ${level}`;
      return `${row}: ${runs.map(({ name }) => name).join(", ") || "idle"}${holds}`;
    });
    awaited.setAttribute("d", path);
    line.setAttribute("d", `M${x} ${top - 4}V${bottom + 4}`);
    handle.setAttribute("transform", `translate(${x},${bottom + 4})`);
    const time = now * end, at = `${time >= 1000 ? Math.round(time) : Number(time.toPrecision(3))} ${unit}`;
    handle.setAttribute("aria-valuenow", Math.round(100 * now));
    handle.setAttribute("aria-valuetext", [at, ...texts].join("; "));
    list.replaceChildren(...[`At ${at}`, ...texts].map((text) => element("li", {}, text)));
  }
  handle.addEventListener("pointerdown", (event) => {
    const over = new AbortController(), until = { signal: over.signal };
    handle.focus();
    event.preventDefault();
    const drag = ({ clientX }) => {
      const { a, e } = layer.getScreenCTM();
      move(((clientX - e) / a - clock[0]) / (clock[1] - clock[0]));
    };
    addEventListener("pointermove", drag, until);
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => over.abort(), until);
  });
  handle.addEventListener("keydown", (event) => {  // to where something starts
    const moments = found.filter(({ name }) => name).map(({ x }) => (x - clock[0]) / (clock[1] - clock[0]));
    const to = { Home: 0, End: 1 }[event.key] ??
      (event.key === "ArrowRight" ? Math.min(1, ...moments.filter((moment) => moment > now + 0.0005))
        : event.key === "ArrowLeft" ? Math.max(0, ...moments.filter((moment) => moment < now - 0.0005)) : null);
    if (to === null) return;
    move(to);
    event.preventDefault();
  });
  return read;
}

function arrowPath(x, y, toX, toY) {
  const angle = Math.atan2(toY - y, toX - x);
  const [left, right] = [-0.4, 0.4].map((side) => `${toX - 11 * Math.cos(angle + side)} ${toY - 11 * Math.sin(angle + side)}`);
  return `M${x} ${y}L${toX} ${toY}M${left}L${toX} ${toY}L${right}`;
}

function render({ model, el }) {
  let all = scenes(model.get("steps")), at = 0, timer = null, drawn = {}, carried = null, resting = null, followed = null;
  const still = matchMedia("(prefers-reduced-motion: reduce)");

  // -- what is on the page
  const paper = element("div", { class: "paper" });
  paper.innerHTML = `<svg role="group" tabindex="-1"><g></g><g class="clock"><path/><path/><g role="slider"
    aria-label="moment" aria-valuemin="0" aria-valuemax="100"><path d="M0 -4L7 3V10H-7V3Z"/><rect x="-16" y="-6" width="32"
    height="30" fill="none"/></g></g></svg>`;  // its marks take the focus
  const svg = paper.firstChild, [marks, layer] = svg.children, moment = element("ul", { class: "moment" });
  const showMoment = playhead(layer, marks, moment);
  const fact = element("p", { class: "fact", "aria-live": "polite" });
  const button = (name, onclick) => Object.assign(element("button", { type: "button" }, name), { onclick });
  const back = button("◀ Back", () => go(at - 1)), forward = button("Forward ▶", () => go(at + 1));
  const play = button("Play", () => (timer ? stop() : start()));
  const slider = element("input", { type: "range", min: 0, value: 0, "aria-label": "step" });
  slider.addEventListener("input", () => go(Number(slider.value)));
  const count = element("span", { "aria-live": "polite" });
  const controls = element("div", { class: "controls" }, back, play, forward, slider, count);
  const table = element("details", {}, element("summary", {}, "The same as a table"), element("div"));
  table.open = model.get("unfolded");
  el.classList.add("labkit-stage");
  // Otherwise JupyterLab would take the arrow keys for itself.
  el.addEventListener("focusin", ({ target }) => target.setAttribute("data-lm-suppress-shortcuts", "true"));
  el.append(controls, fact, paper, moment, table);

  // -- drawing
  const isNarrow = () => 0 < paper.clientWidth && paper.clientWidth < NARROW;
  let wasNarrow = isNarrow();
  const resized = new ResizeObserver(() => {
    if (wasNarrow === isNarrow()) return;
    wasNarrow = isNarrow();
    drawn = {};
    marks.replaceChildren();
    draw();
  });
  resized.observe(paper);
  function draw() {
    const scene = all[at], panels = isNarrow() && scene.panels.length > 1 && scene.panels;
    const changed = scene.keys.filter((key) => drawn[key]?.source !== scene.marks[key]);
    parse(changed.map((key) => scene.marks[key]), model.get("clicks"), scene.journeys).forEach((group, i) => {
      const key = changed[i], source = scene.marks[key];
      if (panels) stack(panels, group);
      if (drawn[key]) morph(drawn[key].group, group);
      drawn[key] = { group: drawn[key]?.group ?? group, source };
    });
    const plain = still.matches || changed.length > MOST_MOVING;
    svg.classList.toggle("plain", plain);
    const kept = {};
    let next = marks.firstElementChild;
    for (const key of scene.keys) {
      const { group } = (kept[key] = drawn[key]);
      while (next?.classList.contains("leaving")) next = next.nextElementSibling;
      if (group === next) next = next.nextElementSibling;
      else {
        if (!group.isConnected) group.classList.add("arriving");
        marks.insertBefore(group, next);
      }
    }
    for (const key in drawn) {
      if (key in kept) continue;
      const { group } = drawn[key];
      group.classList.add("leaving");
      if (plain) group.remove();
      else setTimeout(() => group.remove(), 300);
    }
    drawn = kept;
    const view = panels ? stack(panels) : scene.view;
    svg.setAttribute("viewBox", view.join(" "));
    svg.style.maxWidth = `${view[2] * 1.35}px`;
    svg.style.minWidth = `${view[2] * NARROWEST}px`;
    svg.setAttribute("aria-label", `${scene.title}. ${scene.says}`);
    table.hidden = !scene.table;
    if (table.dataset.html !== scene.table) table.lastChild.innerHTML = table.dataset.html = scene.table;
    controls.hidden = all.length < 2;
    slider.max = all.length - 1;
    slider.value = at;
    count.textContent = `step ${at + 1} of ${all.length}: ${scene.says}`;
    back.disabled = at === 0;
    forward.disabled = at === all.length - 1;
    showMoment(scene.clock);
    if (followed || !fact.textContent) light(null);
    if (!marks.querySelector("[tabindex='0']")) marks.querySelector("[aria-label]")?.setAttribute("tabindex", 0);
  }

  // -- steps
  function go(step) {
    at = Math.max(0, Math.min(all.length - 1, step));
    draw();
    if (at === all.length - 1) stop();
  }
  function start() {
    if (at === all.length - 1) go(0);
    timer = setInterval(() => go(at + 1), 1000 * model.get("seconds"));
    play.textContent = "Pause";
  }
  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  }

  // -- facts and peers
  const markOf = (target) => target.closest?.("[aria-label][data-key]");
  function light(group) {
    const { journeys } = all[at], follows = !group && followed;
    const same = group?.dataset.same ? marks.querySelectorAll(`[data-same="${group.dataset.same}"]`) : [group];
    fact.textContent = [...same].map((each) => each?.getAttribute("aria-label") ?? "").join(" · ");
    if (!group) fact.textContent = journeys[followed ?? ""] ?? "";
    const wanted = new Set([...same].flatMap((each) => (each?.dataset.lights ?? "").split(" ")).filter(Boolean));
    if (follows) wanted.add(followed);
    svg.classList.toggle("lighting", wanted.size > 0);
    svg.classList.toggle("following", Boolean(follows));
    clearTimeout(resting);
    if (!follows) resting = setTimeout(() => svg.classList.remove("lighting"), REST);  // what is lit keeps its frame
    for (const each of marks.children) {
      each.classList.toggle("lit", each === group || (each.dataset.tags ?? "").split(" ").some((tag) => wanted.has(tag)));
    }
  }
  svg.addEventListener("pointerover", (event) => light(markOf(event.target)));
  svg.addEventListener("pointerleave", () => light(markOf(document.activeElement)));
  svg.addEventListener("focusin", (event) => light(markOf(event.target)));
  svg.addEventListener("focusout", () => light(null));

  // What is followed stays lit from step to step, until a click on it or Escape.
  function follow(tag) {
    followed = tag === followed ? null : tag;
    light(null);
  }

  // -- clicks, drags and keys
  function act(group) {
    if (group.dataset.drag && !group.dataset.drop) {  // one that is both is put into place by a click
      carried = group.dataset.key;
      fact.textContent = `${group.getAttribute("aria-label")}. Picked up: go to where it belongs and press Enter.`;
    } else if (carried && group.dataset.drop) {
      model.send({ drop: [carried, group.dataset.key] });
      carried = null;
    } else {
      if (!group.dataset.drag) follow(journeyOf(group, all[at].journeys) ?? null);
      model.send({ click: group.dataset.key });
    }
  }
  svg.addEventListener("click", (event) => markOf(event.target) && act(markOf(event.target)));
  svg.addEventListener("pointerdown", (event) => {
    const group = event.target.closest("[data-drag]");
    if (!group) return;
    event.preventDefault();
    const place = group.style.transform, scale = svg.viewBox.baseVal.width / svg.getBoundingClientRect().width;
    const over = new AbortController(), until = { signal: over.signal };
    const move = ({ clientX, clientY }) => {
      const [x, y] = [clientX - event.clientX, clientY - event.clientY].map((pixels) => pixels * scale);
      group.classList.add("dragged");
      group.style.transform = `${place} translate(${x}px, ${y}px)`;
    };
    const drop = ({ clientX, clientY, type }) => {
      over.abort();
      const was = group.classList.contains("dragged");
      group.classList.remove("dragged");
      group.style.transform = place;
      const below = svg.getRootNode().elementsFromPoint(clientX, clientY).map((each) => each.closest("[data-drop]"));
      const under = below.find((each) => each && each !== group);
      if (was && under && type === "pointerup") model.send({ drop: [group.dataset.key, under.dataset.key] });
    };
    addEventListener("pointermove", move, until);
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, drop, until);
  });
  const TOWARDS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
  svg.addEventListener("keydown", (event) => {
    const group = markOf(event.target);
    if (!group) return;
    if (event.key === "Enter" || event.key === " ") act(group);
    else if (event.key === "Escape" && carried) carried = null;
    else if (event.key === "Escape" && followed) follow(null);
    else if (TOWARDS[event.key]) focusNext(group, TOWARDS[event.key]);
    else return;
    event.preventDefault();
  });
  function focusNext(from, [dx, dy]) {
    const middle = (group) => {
      const { x, y, width, height } = group.getBoundingClientRect();
      return [x + width / 2, y + height / 2];
    };
    const [x, y] = middle(from);
    let best = from, least = Infinity;
    for (const group of marks.querySelectorAll(":scope > [aria-label]")) {
      const [mx, my] = middle(group), along = (mx - x) * dx + (my - y) * dy;
      const aside = Math.abs((mx - x) * dy) + Math.abs((my - y) * dx);
      if (along > 1 && along + 3 * aside < least) [best, least] = [group, along + 3 * aside];
    }
    from.removeAttribute("tabindex");
    best.setAttribute("tabindex", 0);
    best.focus();
  }

  // -- news from Python
  // Changes go into steps, for a page that is saved and for a second view; setting steps draws.
  const changed = () => model.set("steps", [scenes([all[0], model.get("changes")]).at(-1)]);
  const replaced = () => {
    all = scenes(model.get("steps"));
    stop();
    go(Math.min(at, all.length - 1));
  };
  model.on("change:changes", changed);
  model.on("change:steps", replaced);
  draw();
  return () => {
    stop();
    resized.disconnect();
    model.off("change:changes", changed);
    model.off("change:steps", replaced);
  };
}

export default { render };
