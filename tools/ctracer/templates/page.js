
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** A duration for reading. The exact one is in the element's title. */
function time(ns) {
  for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]])
    if (ns >= size) return `${(ns / size).toFixed(3)} ${unit}`;
  return `${ns} ns`;
}

function timed(tag, ns, prefix = "") {
  return make(tag, { className: "number", title: `${ns} ns`, textContent: prefix + time(ns) });
}

/** A part's letter on its colour; grey for none. */
const badge = (part) => make("b", part ? { className: "badge", textContent: part.letter, title: part.name,
  style: `background: ${part.rgb}` } : { className: "badge" });

// ---- A list of many rows, of which only the visible ones exist ----------------------------------

const ROW = 22;
function list(box, render) {
  const inner = make("div");
  box.replaceChildren(inner);
  let rows = [];
  const draw = () => {
    const from = Math.max(0, Math.floor(box.scrollTop / ROW) - 10);
    const shown = rows.slice(from, from + Math.ceil(box.clientHeight / ROW) + 20);
    inner.replaceChildren(...shown.map((row, i) => {
      const element = render(row, from + i);
      element.style.top = `${(from + i) * ROW}px`;
      return element;
    }));
  };
  box.addEventListener("scroll", () => requestAnimationFrame(draw));
  new ResizeObserver(draw).observe(box);
  return {
    draw,
    set(next) { rows = next; inner.style.height = `${rows.length * ROW}px`; draw(); },
    show(i) {
      const top = i * ROW;
      if (top < box.scrollTop || top + ROW > box.scrollTop + box.clientHeight)
        box.scrollTop = top - box.clientHeight / 2;
      draw();
    },
  };
}

/** Up and down pick the neighbouring row. */
function arrows(box, move) {
  box.addEventListener("keydown", (event) => {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    move(step);
  });
}

// ---- Filters and the list of objects --------------------------------------------------------------

let picked, hop = 0, found = [], order = "duration";
const filters = { text: $("text"), cpu: $("cpu"), function: $("function") };
let matches = () => true;

/** The object's number, where that is what is looked for: `#38`. */
const numberIn = (text) => text.trim().match(/^#(\d+)$/)?.[1];

/** A test for events: of this CPU, of this function, with this text in what is known about it. */
function matcher() {
  const cpu = filters.cpu.value, wanted = filters.function.value;
  const text = filters.text.value.trim().toLowerCase();
  const has = (found) => found.toLowerCase().includes(text);
  const number = numberIn(text);
  if (number) return (event) => event.life.life === +number;
  return (event) =>
    (cpu === "" || event.cpu === +cpu)
    && (wanted === "" || event.function.name === wanted)
    && (!text || has(event.life.address) || has(event.thread)
      || has(event.function.name) || valuesOf(event).some(([, , value]) => has(value)));
}

const objects = list($("list"), (life) => make("div", {
  className: `row${life === picked ? " picked" : ""}`, onclick: () => pick(life),
}, timed("span", duration(life), life.end === null ? "≥ " : ""),
timed("span", life.begin),
make("span", { className: "number", textContent: life.events.length }),
make("span", { className: "name", title: `${nameOf(life)} at ${life.address}` }, hasParts(life) ? badge(mainPart(life)) : "",
  ` #${life.life} ${life.parent ? `↳ ${life.link} ` : ""}${describe(life)}  ${life.address}`)));
arrows($("list"), (step) => {
  const next = found[found.indexOf(picked) + step];
  if (next) pick(next);
});

function filter() {
  matches = matcher();
  const all = !filters.text.value.trim() && !filters.cpu.value && !filters.function.value;
  const key = { duration, begin: (life) => -life.begin, count: (life) => life.events.length }[order];
  found = lives.filter((life) => all || life.events.some(matches));
  found.sort((a, b) => key(b) - key(a) || a.life - b.life);
  for (const button of document.querySelectorAll("[data-key]"))
    button.toggleAttribute("aria-sort", button.dataset.key === order);
  $("found").textContent = `${found.length} of ${lives.length} objects`;
  objects.set(found);
  hops.draw();
  if (numberIn(filters.text.value) && found[0] && found[0] !== picked) pick(found[0]);
}

// ---- One object -------------------------------------------------------------------------------------

let shallowest = new Map(), past = new Map(), view = [0, 1];

const hops = list($("calls"), (event, i) => {
  const { function: { name, prototype, parameters }, call, isReturn, value } = event;
  const others = event.others.map(([other, value]) => `${other}=${value}`);
  const parameter = parameters[event.argument] || `argument ${event.argument + 1}`;
  const text = isReturn ? `} ${name}${value === null ? "" : ` = ${value}`}` : `${name}(${[parameter, ...others].join(", ")}) {`;
  const changes = event.changes.map(([field, before, after]) => `${field} ${before ?? "?"} → ${after}`);
  const line = make("span", { title: [prototype, ...changes].join("\n") },
    "  ".repeat(event.depth - shallowest.get(event.thread)) + text);
  line.style.whiteSpace = "pre";
  if (!event.readable) line.append(make("span", { className: "quiet", textContent: "  no copy: freed or unreadable" }));
  line.append(...changes.map((textContent) => make("mark", { textContent })));
  const next = picked.events[i + 1]?.time, gap = gapsOf(picked)[i];
  const wait = next !== undefined ? timed("span", next - event.time)
    : gap ? timed("span", gap.to - gap.from, "≥ ") : make("span");
  return make("div", {
    className: `row call${i === hop ? " picked" : ""}${matches(event) ? "" : " other"}`,
    onclick: () => pickHop(i),
  }, timed("span", event.time - picked.begin),
  wait, gapBar(gap), make("span", { className: "number", textContent: event.cpu }),
  make("span", { textContent: event.thread, title: event.thread }),
  call && !isReturn ? timed("span", call.end - call.begin, call.exit === null ? "≥ " : "") : make("span"),
  line);
});

/** A gap as a bar: as long as its share of the life, in its part's colour, the part's letter before it. */
function gapBar(gap) {
  if (!gap || gap.to === gap.from) return make("span");
  const share = 100 * (gap.to - gap.from) / Math.max(duration(picked), 1), bar = make("i", { className: "bar" });
  bar.style.cssText = `width: ${share}%; ${gap.part ? `background: ${gap.part.rgb}` : ""}`;
  const title = `${titleOfGap(gap)}: ${time(gap.to - gap.from)}, ${share.toFixed(1)} % of the life`;
  return make("span", { className: "gap", title }, badge(gap.part), make("span", {}, bar));
}
arrows($("calls"), (step) => pickHop(Math.min(Math.max(hop + step, 0), picked.events.length - 1)));

function pick(life, at = 0) {
  picked = life;
  shallowest = new Map();
  past = new Map();
  life.events.forEach(({ thread, depth, changes }, i) => {
    shallowest.set(thread, Math.min(depth, shallowest.get(thread) ?? depth));
    for (const [field, before, after] of changes) {
      if (!past.has(field)) past.set(field, [[0, before]]);
      past.get(field).push([i, after]);
    }
  });
  $("name").textContent = `${nameOf(life)}: ${describe(life)}, ${time(duration(life))}`;
  const [least, unseen] = life.end === null ? ["at least ", "; its end was not seen"] : ["", ""];
  const again = life.generation ? `, where ${life.generation} other${life.generation > 1 ? "s were" : " was"} before` : "";
  $("prose").textContent = `${least}${duration(life)} ns, ${life.events.length} events, `
    + `begins ${time(life.begin)} after the first event of the trace, at ${life.address}${again}${unseen}`;
  const link = (to, text) => make("button", { className: "link", textContent: text, onclick: () => pick(to) });
  $("relatives").replaceChildren(
    ...(life.parent ? [`${life.link} of `, link(life.parent, nameOf(life.parent))] : []),
    ...life.children.map((child) => link(child, `→ ${child.link} #${child.life}`)));
  showParts(life);
  view = whole();
  $("calls").scrollTop = 0;
  hops.set(life.events);
  spent(life);
  const row = found.indexOf(life);
  if (row >= 0) objects.show(row); else objects.draw();
  pickHop(at);
}

/** Where the object's time went. A click shows the longest gap of a part. */
function showParts(life) {
  const named = sumsOf(life).filter(({ longest }) => nameOfGap(longest));
  const others = sumsOf(life).filter(({ longest }) => !nameOfGap(longest));
  $("parts").replaceChildren(...[...named, ...others].map(({ time: sum, longest }) => make("button", {
    type: "button", title: `${titleOfGap(longest)}: show the longest gap`, onclick: () => pickHop(longest.at),
  }, badge(longest.part), ` ${nameOfGap(longest) || "other"} ${time(sum)}`,
  make("span", { className: "quiet", textContent: ` ${Math.round(100 * sum / Math.max(duration(life), 1))} %` }))));
  $("parts").hidden = !hasParts(life);
}

function pickHop(at) {
  hop = at;
  // An event beyond what the timeline shows is brought into its middle.
  const now = picked.events[hop]?.time, half = (view[1] - view[0]) / 2;
  if (now < view[0] || now > view[1]) view = [now - half, now + half];
  history.replaceState(null, "", `#${picked.life}.${hop}`);
  hops.show(hop);
  showFields();
  drawTimeline();
}

const heads = (texts) => make("tr", {}, ...texts.map((textContent) => make("th", { textContent })));

/** The time in each function while the object lived, and the time in none of them. */
function spent(life) {
  let busy = 0, until = life.begin;
  for (const call of callsOf(life)) {
    const end = Math.min(call.end, endOf(life));
    busy += Math.max(0, end - Math.max(call.begin, until));
    until = Math.max(until, end);
  }
  const sum = (among, key) => among.reduce((sum, call) => sum + key(call), 0);
  const rows = [...Map.groupBy(callsOf(life), (call) => call.entry.function)].map(([{ name }, among]) =>
    [name, among.length, sum(among, (call) => call.end - call.begin), sum(among, (call) => call.own)]);
  rows.sort((a, b) => b[3] - a[3]);
  rows.push(["(in none of them)", "", "", duration(life) - busy]);
  const most = Math.max(...rows.map((row) => row[3]), 1);
  $("functions").replaceChildren(heads(["Function", "Calls", "Total", "Own", ""]), ...rows.map(([name, count, all, own]) => {
    const bar = make("span", { className: "bar" });
    bar.style.width = `${Math.round(100 * own / most)}px`;
    return make("tr", {}, make("td", { textContent: name }), make("td", { className: "number", textContent: count }),
      all === "" ? make("td") : timed("td", all), timed("td", own), make("td", {}, bar));
  }));
}

/** All fields at the hop, and for each the values that it has had. */
function showFields() {
  const event = picked.events[hop];
  if (!event) return $("fields").replaceChildren();
  const [when, returned] = event.isReturn ? ["when", " returned"] : ["at the call of", ""];
  $("hop").textContent = `${when} ${event.function.name}()${returned}, ${time(event.time - picked.begin)}`;
  const now = new Set(event.changes.map(([field]) => field));
  const fields = new Map(picked.events.slice(0, hop + 1).flatMap(valuesOf).map(([field, , value]) => [field, value]));
  const rows = [...fields].filter(([field]) => !$("changed").checked || past.has(field));
  $("fields").replaceChildren(heads(["Field", "Value", "All its values"]),
    ...rows.map(([field, value]) => make("tr", { className: now.has(field) ? "now" : "" },
      make("td", { textContent: field }), make("td", { textContent: value }),
      make("td", { className: "quiet" }, ...pastOf(field)))));
}

/** The values of a field, in order, each a button that leads to its hop; of many, those near by. */
function pastOf(field) {
  const all = past.get(field) ?? [];
  const at = all.findLastIndex(([i]) => i <= hop);
  const from = Math.max(0, at - 3), near = all.slice(from, at + 6);
  const buttons = near.map(([i, value]) => make("button", { className: "link", onclick: () => pickHop(i),
    title: picked.events[i].function.name, textContent: value ?? "?" }));
  const arrowed = buttons.flatMap((button, i) => i ? ["→ ", button] : [button]);
  return [from ? "… → " : "", ...arrowed, from + near.length < all.length ? "→ …" : ""];
}

// ---- Start -------------------------------------------------------------------------------------------

document.title = $("title").textContent = `struct ${data.type} on Linux ${data.release}`;
$("totals").textContent = `${lives.length} objects, ${events.length} events, ${time(last)}`;
$("ledger").replaceChildren(...data.parts.map(([count, meaning]) => make("tr", {},
  make("td", { className: "number", textContent: count ?? "-" }), make("td", { textContent: meaning }))));
for (const cpu of [...new Set(events.map((event) => event.cpu))].sort((a, b) => a - b)) $("cpu").add(new Option(cpu, cpu));
for (const name of [...new Set(events.map((event) => event.function.name))].sort()) $("function").add(new Option(name, name));
for (const control of Object.values(filters)) control.addEventListener("input", filter);
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("changed").addEventListener("input", () => picked && showFields());
for (const button of document.querySelectorAll("[data-key]"))
  button.addEventListener("click", () => { order = button.dataset.key; filter(); });
filter();
const [, life, at] = location.hash.match(/^#(\d+)\.(\d+)$/) ?? [];
if (lives[life]) pick(lives[life], Math.min(+at, Math.max(lives[life].events.length - 1, 0)));
else if (found.length) pick(found[0]);
