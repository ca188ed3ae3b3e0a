// Shows the scenes of stage.py. A mark is an SVG group with a key; marks with the same key are moved and recoloured
// by CSS transitions, the others fade. Nothing here knows what a picture is about.

const REST = 2000;  // milliseconds: a mouse that rests dims nothing any longer
const NARROW = 600, NARROWEST = 0.73, MARGIN = 8;  // as in scene.py: a picture is shown no lower
const TALLER = 16 / 13;  // panels below each other: their usual letters of 13 pixels have 16 then
const CONDENSED = 0.61;  // but narrower: letters keep their height
const LEGIBLE = 1.1;  // what scrolls all the same is not condensed: letters of 11 pixels have 12 then
const NUMBERS = /-?[\d.]+/g;
const MOST_ZOOM = 32;  // times: the places of marks are rounded to a tenth of a pixel
const SPEEDS = [0.25, 0.5, 1, 2, 4];
const SECONDS_A_MOMENT = 0.6, LEAST_SECONDS = 8, MOST_SECONDS = 45;  // a clock that plays: from one start to the next
const MOST_PALE = 600;  // marks: with more, what is still to come is not pale, which takes a browser too long to paint
const SILENT = 3000;  // milliseconds in which a clock that plays says nothing to those who hear it
const ROOM_BESIDE = 1040, ROOM_BESIDE_GROUPS = 920, LOW = 860;  // pixels: an explorer so wide, in a window so low, has its controls beside its picture
const ABOVE = 310;  // pixels: a browser tab of JupyterLab, and an explorer's sentence, buttons and facts
const PIXELS_A_STEP = 24, ANSWERED = 1000;  // from step to step of a number that is dragged; milliseconds until it goes on unanswered
const MOST_MOVING = 160;  // marks: with more, a browser without a graphics card takes longer to move than to draw them

function scenes(steps) {
  const all = [];
  for (const step of steps) all.push({ ...all.at(-1), ...step, marks: { ...all.at(-1)?.marks, ...step.marks } });
  return all;
}

// What a click keeps lit: a tag with a journey, or else the thing itself with its peers.
function followable({ dataset: { tags = "", same, lights, click } }, journeys) {
  return tags.split(" ").find((tag) => tag && journeys[tag]) ?? (lights && !click && same);
}

function parse(fragments, clicks, journeys) {
  const holder = element("div");
  holder.innerHTML = `<svg>${fragments.join("")}</svg>`;
  const groups = [...holder.firstChild.children];
  for (const group of groups) {
    if (!group.hasAttribute("aria-label")) continue;  // its fact
    const { drag, drop, click } = group.dataset;
    group.setAttribute("role", drag || drop || (click && clicks) || followable(group, journeys) ? "button" : "img");
  }
  return groups;
}

// On a narrow screen, panels stand below each other: moves a mark there, and returns the view of all of them.
function stack(panels, group) {
  const [x, y] = group ? group.style.transform.match(NUMBERS).map(Number) : [NaN, NaN];
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
  for (const name of old.getAttributeNames()) {  // names: a node for each attribute would take twice as long
    if (!now.hasAttribute(name) && name !== "tabindex" && name !== "class") old.removeAttribute(name);
  }
  for (const name of now.getAttributeNames()) {
    const value = now.getAttribute(name);
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const [before, after] = [[...old.children], [...now.children]];
  if (before.length !== after.length || before.some((child, i) => child.tagName !== after[i].tagName)) {
    old.replaceChildren(...after);
  } else if (after.length) {
    before.forEach((child, i) => child.isEqualNode(after[i]) || morph(child, after[i]));
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

// The playhead of a scene with a clock: it says what each row does at its moment, how long it was idle until then, and
// what it waits for; what travels is where it is at that moment. All but the handle is seen from the first touch.
// Time is zoomed: `zoom` times as wide, from the moment `from` on. Moments are shares of the whole: 0 to 1.
function playhead(svg, layers, marks, list, buttons, time) {
  const [layer, travellers] = layers, [ticks, line, awaited, handle, states] = layer.children;
  let clock = [], now = 0, found = [], rows = [], flying = [], moments = [];
  let zoom = 1, from = 0, told = -Infinity;
  function read(given, movers) {  // where the marks stand, after each drawing
    clock = given ?? [];
    layer.style.display = clock.length ? "" : "none";
    if (clock.length) handle.setAttribute("tabindex", 0);
    else handle.removeAttribute("tabindex");
    found = [...(clock.length ? marks.querySelectorAll(":scope > :not(.leaving, :empty)") : [])].map((group) => {
      const [x, y] = unfolded(...group.style.transform.match(NUMBERS).map(Number)), bar = group.firstElementChild, parts = [...group.children];
      const size = bar.tagName === "path" ? "d" : "width", full = (group.dataset.full ??= bar.getAttribute(size) ?? "");
      const width = Number(size === "d" ? full.match(NUMBERS)[2] : full), height = Number(bar.getAttribute("height"));
      const inTime = bar.tagName !== "text" && x >= clock[0] && x < clock[1] && y >= clock[2] && y < clock[3];
      return { ...group.dataset, group, x, y, width, height, bar, size, full, parts, inTime };
    });
    rows = rowsOf(found);
    states.replaceChildren(...rows.flatMap(({ texts }) => texts));
    for (const row of rows) placeTexts(row, clock);
    moments = [...new Set(rows.flatMap(({ runs }) => runs.map(({ x }) => share(x))))].sort((one, other) => one - other);
    travellers.replaceChildren();
    svg.classList.toggle("piled", Boolean(movers?.length));
    flying = (movers ?? []).map((mover) => ({ ...mover }));
    look(zoom, from);
  }

  // -- zoom
  // Where time is folded into bands (see narrow.py), a clock ends in their width and height. Here time goes on.
  const bandAt = (place, size) => (size ? Math.max(0, Math.floor(place / size)) : 0);
  function unfolded(x, y) {
    const [, , top, , , , , , wide = 0, tall = 0] = clock, band = bandAt(y - top + 1, tall);
    return [x + band * wide, y - band * tall];
  }
  function folded(x, y) {
    const [left, right, , , , , , , wide = 0, tall = 0] = clock, band = bandAt(Math.min(x, right - 1) - left, wide);
    return [x - band * wide, y + band * tall];
  }
  const share = (x) => (x - clock[0]) / (clock[1] - clock[0]), clamp = (low, x, high) => Math.max(low, Math.min(high, x));
  const seen = (x) => clock[0] + (share(x) - from) * zoom * (clock[1] - clock[0]);
  const inside = (x) => clamp(clock[0], seen(x), clock[1]);
  function place({ group, bar, x, y, width, height, size, full, parts, name, ink }, whole) {  // cut, and with its name
    const outside = seen(x + width) <= clock[0] || seen(x) >= clock[1], start = outside ? seen(x) : inside(x);
    const wide = outside ? width * zoom : inside(x + width) - start;
    group.classList.toggle("outside", outside && !whole);
    group.style.transform = `translate(${whole ? x : start}px, ${y}px)`;
    group.replaceChildren(...(whole ? parts : [bar]));
    bar.setAttribute(size, whole ? full : size === "d" ? arrowPath(0, 0, wide, full.match(NUMBERS)[3]) : wide);
    if (whole || outside || !(height >= 13 && wide >= 7.5 * name?.length + 4)) return;
    group.insertAdjacentHTML("beforeend", `<text font-size="12" x="${wide / 2}" y="${height / 2 + 4.2}" fill="${ink ?? ""}"/>`);
    group.lastChild.textContent = name;
  }
  function look(times, first) {  // shows a part of the time, with the playhead in it
    if (times > 1 || zoom > 1) svg.classList.add("plain");
    [zoom, from] = [times, clamp(0, first, 1 - 1 / times)];
    const [left, right, , bottom, end] = clock, least = end / zoom / 8, power = 10 ** Math.floor(Math.log10(least));
    if (svg.classList.contains("zoomed") || zoom > 1) placeAll(zoom === 1);
    svg.classList.toggle("zoomed", zoom > 1);
    for (const [i, button] of [...buttons.children].entries()) button.disabled = zoom === (i ? 1 : MOST_ZOOM);
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= least * (1 - 1e-9));
    ticks.innerHTML = "";
    for (let n = Math.ceil(from * end / step - 1e-9); n * step <= (from + 1 / zoom) * end * (1 + 1e-9); n++) {
      const at = seen(left + n * step / end * (right - left)), text = Number((n * step).toPrecision(6));
      ticks.innerHTML += `<path d="M${at} ${bottom + 4}v5"/><text x="${at}" y="${bottom + 25.5}">${text}</text>`;
    }
    move(clamp(from, now, from + 1 / zoom));
  }
  const placeAll = (whole) => found.filter(({ inTime }) => inTime).forEach((mark) => place(mark, whole));
  function zoomBy(factor, at = now) {  // what is at this moment stays where it is
    const times = clamp(1, zoom * factor, MOST_ZOOM);
    if (clock.length && !clock[8]) look(times, at - (at - from) * zoom / times);
  }
  const reveal = (group) => group.classList.contains("outside")
    && look(zoom, share(found.find((mark) => mark.group === group).x) - 0.3 / zoom);
  function pointed({ clientX, clientY }) {
    const { a, d, e, f } = layer.getScreenCTM();
    return share(unfolded((clientX - e) / a, (clientY - f) / d)[0]) / zoom + from;
  }
  svg.addEventListener("wheel", (event) => {
    if (!clock.length || !event.ctrlKey) return;
    event.preventDefault();
    zoomBy(Math.exp(-clamp(-50, event.deltaY, 50) / 100), pointed(event));
  }, { passive: false });
  svg.addEventListener("dblclick", () => zoomBy(0));
  svg.addEventListener("keydown", (event) => {
    const factor = { "+": 2, "=": 2, "-": 0.5, 0: 0 }[event.key];
    if (factor === undefined || !clock.length || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const mark = found.find(({ group, inTime }) => inTime && group === event.target);
    zoomBy(factor, mark && share(mark.x + mark.width / 2));
  });
  [2, 0.5, 0].forEach((factor, i) => buttons.children[i].addEventListener("click", () => zoomBy(factor)));

  // -- the playhead
  function move(to) {
    now = clamp(0, to, 1);
    buttons.hidden = list.hidden = time.hidden = !clock.length;
    buttons.hidden ||= Boolean(clock[8]);
    if (list.hidden) return;
    const [left, right, , bottom, end, unit] = clock, x = left + now * (right - left), playing = svg.classList.contains("playing");
    const lengthOf = (width) => Number((width / (right - left) * end).toPrecision(3));
    let path = "", cut = "";
    const says = rows.map((row) => {
      const { work, said, level, idle } = at(row, x);
      const isSeen = svg.classList.contains("touched");
      for (const bar of row.bars) {
        bar.bar.setAttribute("width", bar.width * (isSeen ? (level ?? 0) / (Number(bar.level) || 1) : 1));
      }
      for (const run of said) path += awaitedBy(run, x);
      const [there, top] = folded(seen(x), row.top - 3);
      cut += `M${there} ${top}v${row.bottom - row.top + 6}`;
      showState(row, work?.short ?? work?.name ?? "idle", idle ? `idle ${lengthOf(idle)}` : "");
      if (playing && found.length <= MOST_PALE) row.runs.forEach((run) => setFuture(run, run.x > x));
      const holds = level === undefined ? "" : ` · holds ${level}`;
      return `${row.name}: ${said.map(({ name }) => name).join(", ") || "idle"}${holds}`;
    });
    fly(x);
    awaited.setAttribute("d", path);
    line.setAttribute("d", cut);
    handle.setAttribute("transform", `translate(${folded(seen(x), bottom + 4)})`);
    const number = now * end >= 1000 ? Math.round(now * end) : Number((now * end).toPrecision(3));
    const moment = `${number} ${number === 1 ? unit.replace("units", "unit") : unit}`;
    time.textContent = `At ${moment}`;
    if (playing && performance.now() - told < SILENT) return;  // what is heard changes less often than what is seen
    told = performance.now();
    handle.setAttribute("aria-valuenow", Math.round(100 * now));
    handle.setAttribute("aria-valuetext", [moment, ...says].join("; "));
    list.replaceChildren(...[`At ${moment}`, ...says].map((text) => element("li", {}, text)));
  }
  function at(row, x) {  // what runs there, what of it is work, what is held, and how long it was idle
    const under = row.runs.filter((mark) => mark.x <= x + 0.1 && x < mark.x + mark.width - 0.1);
    const last = row.runs.findLast((mark) => mark.x <= x && x < mark.x + mark.width + 1);  // at the very end
    const said = under.length || !last ? under : [last], level = said.find((mark) => mark.level)?.level;
    const idle = row.gaps.reduce((sum, gap) => sum + clamp(0, x - gap.x, gap.width), 0);
    return { said, level, idle, work: said.find(({ name }) => !name.endsWith("under way")) };
  }
  function setFuture(run, is) {
    if (run.isFuture !== is) run.group.classList.toggle("future", (run.isFuture = is));
  }
  function awaitedBy(run, x) {
    const keys = run.awaits?.split(" "), all = keys ? found.filter(({ key }) => keys.includes(key)) : [];
    return all.map((to) => {
      const there = inside(clamp(to.x, x, to.x + to.width));
      return arrowPath(...folded(seen(x), run.y + run.height / 2), ...folded(there, to.y + to.height / 2));
    }).join("");
  }
  function showState({ texts: [paper, state, count] }, text, idle) {  // at the row's end
    const [left, right, , , , , beside] = clock, onLeft = (now - from) * zoom > 0.75;
    if (state.textContent !== text) state.textContent = text;
    if (beside && count.textContent !== idle) count.textContent = idle;
    if (beside) return;
    const long = 6.9 * text.length + 10;  // on a slip of paper, over what runs at the other end
    paper.setAttribute("width", long);
    paper.setAttribute("x", onLeft ? left + 2 : right - long - 2);
    state.setAttribute("x", onLeft ? left + 7 : right - long + 3);
  }
  function fly(x) {  // what travels stands between the two frames of this moment
    const isTouched = svg.classList.contains("touched"), jumps = svg.classList.contains("steps");
    for (const mover of flying) {
      const { frames } = mover, isThere = isTouched && frames[0][0] <= now && now < frames.at(-1)[0];
      if (!isThere && mover.group?.isConnected) mover.group.remove();
      if (!isThere) continue;
      const next = frames.findIndex(([moment]) => moment > now), [start, x0, y0] = frames[next - 1], [end, x1, y1] = frames[next];
      const way = jumps ? 0 : (now - start) / (end - start), eased = way * way * (3 - 2 * way);
      const [atX, atY] = [x0 + (x1 - x0) * eased, y0 + (y1 - y0) * eased];
      mover.group ??= traveller(mover);
      if (!mover.group.isConnected) travellers.append(mover.group);
      mover.group.setAttribute("transform", `translate(${atX < clock[1] ? seen(atX) : atX},${atY})`);
    }
  }
  handle.addEventListener("focus", touch);
  handle.addEventListener("pointerdown", (event) => {
    const over = new AbortController(), until = { signal: over.signal };
    handle.focus();
    event.preventDefault();
    addEventListener("pointermove", (moved) => follow(pointed(moved)), until);
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => over.abort(), until);
  });
  handle.addEventListener("keydown", (event) => {  // to where something starts
    const to = { Home: 0, End: 1, ArrowRight: next(1), ArrowLeft: next(-1) }[event.key] ?? null;
    if (to === null) return;
    follow(to);
    event.preventDefault();
  });
  const next = (way) => (way > 0 ? moments.find((moment) => moment > now + 0.0005) ?? 1
    : moments.findLast((moment) => moment < now - 0.0005) ?? 0);
  function touch() {
    if (svg.classList.contains("touched")) return;
    svg.classList.add("touched");
    move(now);
  }
  function follow(to) {  // the part of the time that is shown goes with it
    touch();
    if (zoom > 1 && (to < from || to > from + 1 / zoom)) look(zoom, to < from ? to - 0.1 / zoom : to - 0.9 / zoom);
    move(to);
  }
  const seconds = () => clamp(LEAST_SECONDS, SECONDS_A_MOMENT * moments.length, MOST_SECONDS);
  return { read, reveal, follow, next, seconds, at: () => now, restore: () => zoom > 1 && placeAll(true) };
}

// What has a row, by row: what runs there by its start, the bars that follow the playhead, and the texts at its end.
function rowsOf(found) {
  const rows = new Map();
  for (const mark of found.filter(({ row }) => row)) {
    if (!rows.has(mark.row)) rows.set(mark.row, { name: mark.row, runs: [], bars: [] });
    rows.get(mark.row)[mark.name ? "runs" : "bars"].push(mark);
  }
  return [...rows.values()].filter(({ runs }) => runs.length).map((row) => {
    const top = Math.min(...row.runs.map(({ y }) => y)), bottom = Math.max(...row.runs.map(({ y, height }) => y + height));
    const gaps = row.runs.filter(({ name }) => name.startsWith("idle"));
    return { ...row, gaps, top, bottom, texts: ["rect", "text", "text"].map(drawn) };
  });
}

const drawn = (tag) => document.createElementNS("http://www.w3.org/2000/svg", tag);

// Where a row's state stands, and how long it was idle: beside it, or on a slip of paper at its end.
function placeTexts({ top, texts: [paper, state, count] }, [, , , , , , beside, right]) {
  for (const [name, value] of Object.entries({ x: beside, y: top + (beside ? 9 : 19.5) })) state.setAttribute(name, value);
  for (const [name, value] of Object.entries({ x: right, y: top + 26, class: "count" })) count.setAttribute(name, value);
  for (const [name, value] of Object.entries({ y: top + 5, height: 20, rx: 3 })) paper.setAttribute(name, value);
}

function traveller({ text, width, height, radius, fill, ink }) {
  const group = drawn("g");
  group.innerHTML = `<rect x="${-width / 2}" y="${-height / 2}" width="${width}" height="${height}" rx="${radius}" fill="${fill}"/>`
    + (text && `<text y="4" font-size="11" fill="${ink}">${text}</text>`);
  return group;
}

function arrowPath(x, y, toX, toY) {
  const angle = Math.atan2(toY - y, toX - x);
  const [left, right] = [-0.4, 0.4].map((side) => `${toX - 11 * Math.cos(angle + side)} ${toY - 11 * Math.sin(angle + side)}`);
  return `M${x} ${y}L${toX} ${toY}M${left}L${toX} ${toY}L${right}`;
}

// Numbers in an explorer's sentence that move a slider of it, by drags and keys: a step is one of the slider's.
const withNumbers = new WeakSet();
function moveNumbers(home) {
  if (withNumbers.has(home)) return;
  withNumbers.add(home);
  let held = "", drag = null, last = {};  // the name of the number with the focus; the sentence with it is written anew after each step
  const named = (name) => [...home.querySelectorAll("[data-control]")].find((each) => each.getAttribute("aria-label") === name);
  function step(number, way) {  // what was refused is passed over by the next step that way
    const { control } = number.dataset, labels = [...home.querySelectorAll(".labkit-choice label")];
    const input = labels.find(({ textContent }) => textContent === control)?.parentElement.querySelector("input");
    if (!input || input.disabled) return;
    const before = input.value, isAgain = last.control === control && last.way === way && last.before === before;
    input.value = (isAgain ? last.to : Number(before)) + way;  // not beyond its ends
    if (input.value === before) return;
    last = { control, way, before, to: Number(input.value) };
    input.dispatchEvent(new Event("input"));
  }
  function follow() {  // one step for each answer, as long as the pointer is ahead
    const number = named(held), way = Math.trunc((drag.x - drag.from) / PIXELS_A_STEP);
    const isAnswered = number !== drag.asked || performance.now() - drag.since > ANSWERED;
    if (!way || !number || !isAnswered) return;
    Object.assign(drag, { from: drag.from + Math.sign(way) * PIXELS_A_STEP, asked: number, since: performance.now() });
    step(number, Math.sign(way));
  }
  home.addEventListener("focusin", ({ target }) => {
    held = target.dataset.control ? target.getAttribute("aria-label") : "";
    if (held) target.setAttribute("data-lm-suppress-shortcuts", "true");
  });
  home.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!way || !event.target.dataset.control) return;
    event.preventDefault();
    step(event.target, way);
  });
  home.addEventListener("pointerdown", (event) => {
    const number = event.target.closest("[data-control]"), over = new AbortController();
    if (!number) return;
    event.preventDefault();
    number.focus();
    drag = { from: event.clientX, x: event.clientX };
    addEventListener("pointermove", ({ clientX }) => ((drag.x = clientX), follow()), { signal: over.signal });
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => ((drag = null), over.abort()), { signal: over.signal });
  });
  new MutationObserver(() => {
    if (!held) return;
    const { activeElement } = home.getRootNode();
    if (!activeElement || activeElement === document.body) named(held)?.focus();
    if (drag) follow();
  }).observe(home, { childList: true, subtree: true });
}

function render({ model, el }) {
  let all = scenes(model.get("steps")), at = 0, timer = null, drawn = {}, stacked = "", carried = null, resting = null, followed = null, told = null;
  let saidAt = 0;
  const still = matchMedia("(prefers-reduced-motion: reduce)");

  // -- what is on the page
  const paper = element("div", { class: "paper" });
  paper.innerHTML = `<svg role="group" tabindex="-1" preserveAspectRatio="none"><g></g><g class="clock"><g class="ticks"/><path/><path/><g role="slider"
    aria-label="moment" aria-valuemin="0" aria-valuemax="100"><path d="M0 -4L7 3V10H-7V3Z"/><rect x="-16" y="-6" width="32"
    height="30" fill="none"/></g><g class="states" aria-hidden="true"/></g><g class="travellers" aria-hidden="true"></g></svg>`;  // its marks take the focus
  const svg = paper.firstChild, [marks, ...layers] = svg.children, moment = element("ul", { class: "moment" });
  const fact = element("p", { class: "fact", "aria-live": "polite" });
  const button = (name, onclick) => Object.assign(element("button", { type: "button" }, name), { onclick });
  const back = button("◀ Back", () => step(-1)), forward = button("Forward ▶", () => step(1));
  const zooms = [button("Zoom in"), button("Zoom out"), button("All")];
  const buttons = element("div", { class: "controls" }, ...zooms, "Keys + − 0, or Ctrl and the wheel");
  const hour = element("span", { class: "hour", hidden: "" }), heard = element("span", { class: "heard", role: "status" });
  const time = playhead(svg, layers, marks, moment, buttons, hour);
  const paperFollows = (to) => {  // where only a part of a picture is seen, that with the playhead
    if (paper.scrollWidth <= paper.clientWidth + 1) return;
    const [left, right] = all[at].clock, x = left + MARGIN + to * (right - left);
    paper.scrollLeft = x * svg.clientWidth / svg.viewBox.baseVal.width - 0.6 * paper.clientWidth;
  };
  const play = button("Play", () => (timer ? stop() : start()));
  const slider = element("input", { type: "range", min: 0, value: 0, "aria-label": "step" });
  slider.addEventListener("input", () => go(Number(slider.value)));
  const count = element("span");
  const speed = element("select", { "aria-label": "speed" }, ...SPEEDS.map((each) => new Option(`${each} ×`, each, each === 1, each === 1)));
  const controls = element("div", { class: "controls" }, back, play, forward, speed, slider, count, hour, heard);
  const table = element("details", {}, element("summary", {}, "The same as a table"), element("div"));
  table.open = model.get("unfolded");
  el.classList.add("labkit-stage");
  // Otherwise JupyterLab would take the arrow keys for itself.
  el.addEventListener("focusin", ({ target }) => target.setAttribute("data-lm-suppress-shortcuts", "true"));
  el.append(controls, fact, paper, buttons, moment, table);

  // -- drawing
  const isNarrow = () => 0 < paper.clientWidth && paper.clientWidth < NARROW;
  let wasNarrow = isNarrow();
  const resized = new ResizeObserver(() => {
    const home = el.closest(".labkit-explorer");
    if (home) moveNumbers(home);
    const isGrouped = home?.querySelector(".labkit-group") != null;
    const isWide = home?.clientWidth >= (isGrouped ? ROOM_BESIDE_GROUPS : ROOM_BESIDE);
    home?.classList.toggle("labkit-beside", isWide && innerHeight < LOW);
    // A class: with :has() in its place, each change of the picture costs 10 ms more of style.
    home?.classList.toggle("labkit-grouped", isGrouped);
    if (wasNarrow === isNarrow()) return;
    wasNarrow = isNarrow();
    drawn = {};
    marks.replaceChildren();
    draw();
  });
  resized.observe(paper);
  function draw() {
    const scene = all[at], panels = isNarrow() && scene.panels.length > 1 && scene.panels;
    time.restore();
    const moved = stacked !== (stacked = String(panels));  // what is below a panel goes with its height
    const changed = scene.keys.filter((key) => moved || drawn[key]?.source !== scene.marks[key]);
    parse(changed.map((key) => scene.marks[key]), model.get("clicks"), scene.journeys).forEach((group, i) => {
      const key = changed[i], source = scene.marks[key];
      if (panels) stack(panels, group);
      if (drawn[key]) morph(drawn[key].group, group);
      drawn[key] = { group: drawn[key]?.group ?? group, source };
    });
    const plain = still.matches || changed.length > MOST_MOVING;
    svg.classList.toggle("plain", plain);
    svg.classList.toggle("steps", still.matches);
    const kept = {}, stays = new Set(scene.keys);
    for (const key in drawn) drawn[key].group.classList.toggle("leaving", !stays.has(key));  // first: what stays keeps its place, and moves
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
      if (plain) group.remove();
      else setTimeout(() => group.remove(), 300);
    }
    drawn = kept;
    const view = panels ? stack(panels) : scene.view;
    svg.setAttribute("viewBox", view.join(" "));
    const inWindow = `(100vh - ${ABOVE}px) * ${view[2] / view[3]}`;  // no larger than it can be seen whole, unless letters suffer
    svg.style.maxWidth = `max(${view[2]}px, min(${view[2] * 1.35}px, ${inWindow}))`;
    const scrolls = isNarrow() && view[2] * CONDENSED > paper.clientWidth;
    svg.style.minWidth = `${view[2] * (scrolls ? LEGIBLE : CONDENSED)}px`;
    svg.style.minHeight = `${view[3] * (panels ? TALLER : NARROWEST)}px`;
    svg.style.aspectRatio = view[2] / view[3];
    svg.setAttribute("aria-label", `${scene.title}. ${scene.says}`);
    table.hidden = !scene.table;
    if (table.dataset.html !== scene.table) table.lastChild.innerHTML = table.dataset.html = scene.table;
    controls.hidden = all.length < 2 && !scene.clock.length;
    slider.hidden = count.hidden = all.length < 2;
    slider.max = all.length - 1;
    slider.value = at;
    const isHeard = !timer || at === all.length - 1 || performance.now() - saidAt > SILENT;
    count.setAttribute("aria-live", isHeard ? "polite" : "off");
    if (isHeard) saidAt = performance.now();
    count.textContent = all.length > 1 ? `step ${at + 1} of ${all.length}: ${scene.says}` : "";
    back.disabled = all.length > 1 && at === 0;
    forward.disabled = all.length > 1 && at === all.length - 1;
    time.read(scene.clock, scene.movers);
    const isThere = told && drawn[told.dataset.key]?.group === told;
    if (isThere && !followed) say(told);  // what it says now
    else if (followed || told || !fact.textContent) light(null);
    const stay = (which) => marks.querySelector(`:scope > ${which}:not(.leaving)`);
    if (!stay("[tabindex='0']")) stay("[aria-label]")?.setAttribute("tabindex", 0);
  }

  // -- steps
  function go(step) {
    at = Math.max(0, Math.min(all.length - 1, step));
    draw();
    if (at === all.length - 1) stop();
  }
  const isTimed = () => all.length === 1;  // then the playhead moves, not the picture
  function step(way) {
    stop();
    svg.style.removeProperty("--move");
    if (!isTimed()) return go(at + way);
    time.follow(time.next(way));
    paperFollows(time.at());
    hear();
  }
  function start() {
    play.textContent = "Pause";
    if (isTimed()) return run();
    if (at === all.length - 1) go(0);
    goOn();
  }
  function goOn() {  // to the next step, which takes its time; between usual ones there is time to read
    const { lasts } = all[at + 1] ?? {}, milliseconds = 1000 * model.get("seconds") * (lasts || 1) / speed.value;
    svg.style.setProperty("--move", `${Math.round(milliseconds * (lasts ? 1 : 0.7))}ms`);
    svg.style.setProperty("--ease", lasts ? "linear" : "ease-in-out");
    const waiting = setTimeout(goOn, milliseconds);
    timer = { cancel: () => clearTimeout(waiting) };
    go(at + 1);
  }
  function run() {  // frame by frame or, for whom motion is too much, from start to start
    if (time.at() >= 1) time.follow(0);
    svg.classList.add("playing");
    if (still.matches) {
      timer = every(1000, () => pass(time.next(1)));
      return;
    }
    let last = performance.now(), asked = null;
    const frame = (now) => {
      const gone = Math.max(0, now - last) / 1000;
      last = now;
      asked = requestAnimationFrame(frame);
      pass(time.at() + gone * speed.value / time.seconds());
    };
    asked = requestAnimationFrame(frame);
    timer = { cancel: () => cancelAnimationFrame(asked) };
  }
  function every(milliseconds, call) {
    const timer = setInterval(call, milliseconds / speed.value);
    return { cancel: () => clearInterval(timer) };
  }
  function pass(to) {
    time.follow(to);
    paperFollows(time.at());
    if (time.at() >= 1) stop();
  }
  function stop() {
    timer?.cancel();
    if (!timer) return;
    timer = null;
    svg.style.removeProperty("--ease");
    if (at < all.length - 1) svg.style.removeProperty("--move");  // the last step still takes its time
    play.textContent = "Play";
    svg.classList.remove("playing");
    if (!isTimed()) {
      count.setAttribute("aria-live", "polite");
      count.replaceChildren(count.textContent);  // so that it is said now
      return;
    }
    time.follow(time.at());
    hear();
    if (time.at() >= 1) for (const each of marks.querySelectorAll(".future")) each.classList.remove("future");
  }
  const hear = () => (heard.textContent = [...moment.children].map((each) => each.textContent).join("; "));
  speed.addEventListener("change", () => timer && (stop(), start()));

  // -- facts and peers
  const markOf = (target) => target.closest?.("[aria-label][data-key]");
  function say(group) {
    const same = group?.dataset.same ? [...marks.querySelectorAll(`[data-same="${group.dataset.same}"]`)] : [group];
    const text = same.map((each) => each?.getAttribute("aria-label") ?? "").join(" · ");
    const says = group ? text : all[at].journeys[followed ?? ""] ?? "";
    if (fact.textContent !== says) fact.textContent = says;  // a screen reader reads what is written, again
    told = group;
    return same;
  }
  function light(pointed) {
    const { journeys } = all[at], follows = !pointed && followed;
    const group = pointed ?? (follows ? marks.querySelector(`[data-same="${followed}"]`) : null), same = say(group);
    const wanted = new Set(same.flatMap((each) => (each?.dataset.lights ?? "").split(" ")).filter(Boolean));
    if (follows && journeys[followed]) wanted.add(followed);
    svg.classList.toggle("lighting", wanted.size > 0);
    svg.classList.toggle("following", Boolean(follows));
    clearTimeout(resting);
    if (!follows) resting = setTimeout(() => svg.classList.remove("lighting"), REST);  // what is lit keeps its frame
    for (const each of marks.children) {
      each.classList.toggle("lit", each === group || (each.dataset.tags ?? "").split(" ").some((tag) => wanted.has(tag)));
    }
  }
  svg.addEventListener("mouseover", (event) => light(markOf(event.target)));  // a tap comes as these, too, and stays lit
  svg.addEventListener("mouseleave", () => light(markOf(document.activeElement)));
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
      if (!group.dataset.drag) follow(followable(group, all[at].journeys) ?? null);
      model.send({ click: group.dataset.key });
    }
  }
  svg.addEventListener("click", (event) => markOf(event.target) && act(markOf(event.target)));
  svg.addEventListener("pointerdown", (event) => {
    const group = event.target.closest("[data-drag]");
    if (!group) return;
    event.preventDefault();
    const place = group.style.transform, { a, d } = svg.getScreenCTM();
    const over = new AbortController(), until = { signal: over.signal };
    const move = ({ clientX, clientY }) => {
      const [x, y] = [(clientX - event.clientX) / a, (clientY - event.clientY) / d];
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
    time.reveal(best);
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
    for (const each of marks.querySelectorAll(".future")) each.classList.remove("future");
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
