
const $ = (id) => document.getElementById(id);

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

let picked = -1, hop = 0, found = [], order = "duration";
const filters = { text: $("text"), cpu: $("cpu"), function: $("function") };
let matches = () => true;

/** A test for events: of this CPU, of this function, with this text in what is known about it. */
function matcher() {
  const cpu = filters.cpu.value, wanted = filters.function.value;
  const text = filters.text.value.trim().toLowerCase();
  const has = (found) => found.toLowerCase().includes(text);
  return (event) =>
    (cpu === "" || events.cpu[event] === +cpu)
    && (wanted === "" || events.function[event] === +wanted)
    && (!text || has(lives.address[events.life[event]]) || has(events.thread[event])
      || has(nameOfFunction(event)) || valuesOf(event).some(([, , value]) => has(value)));
}

const objects = list($("list"), (life) => make("div", {
  className: `row${life === picked ? " picked" : ""}`, onclick: () => pick(life),
}, timed("span", duration(life), lives.end[life] === null ? "≥ " : ""),
timed("span", lives.begin[life]),
make("span", { className: "number", textContent: eventsOf[life].length }),
make("span", { className: "name", title: nameOf(life),
  textContent: `${lives.parent[life] === null ? "" : `↳ ${lives.link[life]} `}${describe(life)}  ${lives.address[life]}` })));
arrows($("list"), (step) => {
  const at = found.indexOf(picked) + step;
  if (found[at] !== undefined) pick(found[at]);
});

function filter() {
  matches = matcher();
  const all = !filters.text.value.trim() && !filters.cpu.value && !filters.function.value;
  const key = { duration, begin: (life) => -lives.begin[life], count: (life) => eventsOf[life].length }[order];
  found = eventsOf.map((_, life) => life).filter((life) => all || eventsOf[life].some(matches));
  found.sort((a, b) => key(b) - key(a) || a - b);
  for (const button of document.querySelectorAll("[data-key]"))
    button.toggleAttribute("aria-sort", button.dataset.key === order);
  $("found").textContent = `${found.length} of ${total.lives} objects`;
  objects.set(found);
  hops.draw();
}

// ---- One object -------------------------------------------------------------------------------------

let shallowest = new Map(), steps = [], past = new Map(), view = [0, 1];

/** The arguments of a call that are no objects: `name=value`. */
function others(event) {
  return events.arguments[event].map(([name, value]) => `${name}=${value}`);
}

const hops = list($("calls"), (event, i) => {
  const life = picked, call = events.call[event], isReturn = events.isReturn[event];
  const { name, prototype, parameters } = functions[events.function[event]];
  const own = eventsOf[life];
  const parameter = parameters[events.argument[event]] || `argument ${events.argument[event] + 1}`;
  const text = isReturn
    ? `} ${name}${events.value[event] === null ? "" : ` = ${events.value[event]}`}`
    : `${name}(${[parameter, ...others(event)].join(", ")}) {`;
  const line = make("span", { title: prototype }, "  ".repeat(events.depth[event] - shallowest.get(events.thread[event])) + text);
  line.style.whiteSpace = "pre";
  if (!events.readable[event]) line.append(make("span", { className: "quiet", textContent: "  no copy: freed or unreadable" }));
  for (const [field, before, after] of steps[i])
    line.append(make("mark", { textContent: `${field} ${before ?? "?"} → ${after}` }));
  line.title += steps[i].map(([field, before, after]) => `\n${field} ${before ?? "?"} → ${after}`).join("");
  const next = own[i + 1];
  const lasted = call !== null && !isReturn;
  const wait = next === undefined ? make("span") : timed("span", events.time[next] - events.time[event]);
  const share = next === undefined ? 0 : 100 * (events.time[next] - events.time[event]) / Math.max(duration(life), 1);
  wait.style.background = `linear-gradient(to left, var(--pick) ${share}%, transparent ${share}%)`;
  return make("div", {
    className: `row call${i === hop ? " picked" : ""}${matches(event) ? "" : " other"}`,
    onclick: () => pickHop(i),
  }, timed("span", events.time[event] - lives.begin[life]),
  wait, make("span", { className: "number", textContent: events.cpu[event] }),
  make("span", { textContent: events.thread[event], title: events.thread[event] }),
  lasted ? timed("span", calls.end[call] - calls.begin[call], calls.exit[call] === null ? "≥ " : "") : make("span"),
  line);
});
arrows($("calls"), (step) => pickHop(Math.min(Math.max(hop + step, 0), steps.length - 1)));

function pick(life, at = 0) {
  picked = life;
  steps = eventsOf[life].map((event) => events.changes[event]);
  shallowest = new Map();
  for (const event of eventsOf[life])
    shallowest.set(events.thread[event], Math.min(events.depth[event], shallowest.get(events.thread[event]) ?? Infinity));
  past = new Map();
  steps.forEach((step, i) => step.forEach(([field, before, after]) => {
    if (!past.has(field)) past.set(field, [[0, before]]);
    past.get(field).push([i, after]);
  }));
  $("name").textContent = `${nameOf(life)}: ${describe(life)}, ${time(duration(life))}`;
  const ended = lives.end[life] !== null;
  $("prose").textContent = `${ended ? "" : "at least "}${duration(life)} ns, ${eventsOf[life].length} events, `
    + `begins ${time(lives.begin[life])} after the first event of the trace`
    + (ended ? "" : "; its end was not seen");
  const link = (to, text) => make("button", { className: "link", textContent: text, onclick: () => pick(to) });
  const parent = lives.parent[life];
  $("relatives").replaceChildren(
    ...(parent === null ? [] : [`${lives.link[life]} of `, link(parent, nameOf(parent))]),
    ...childrenOf[life].map((child) => link(child, `→ ${lives.link[child]} ${lives.address[child]}`)));
  const lastCall = callsOf(life).reduce((end, call) => Math.max(end, calls.end[call]), lives.end[life] ?? lastOf(life));
  view = [lives.begin[life], Math.max(lastCall, lives.begin[life] + 1)];
  $("calls").scrollTop = 0;
  hops.set(eventsOf[life]);
  spent(life);
  const row = found.indexOf(life);
  if (row >= 0) objects.show(row); else objects.draw();
  pickHop(at);
}

function pickHop(at) {
  hop = at;
  history.replaceState(null, "", `#${picked}.${hop}`);
  hops.show(hop);
  showFields();
  drawTimeline();
}

const callsOf = (life) => [...new Set(eventsOf[life].map((event) => events.call[event]))].filter((call) => call !== null);
/** What the first event of a call says. */
const of = (column, call) => events[column][calls.entry[call]];

/** The time in each function while the object lived, and the time in none of them. */
function spent(life) {
  const rows = new Map();
  let busy = 0, until = lives.begin[life];
  for (const call of callsOf(life)) {
    const row = rows.get(of("function", call)) ?? [0, 0, 0];
    rows.set(of("function", call), [row[0] + 1, row[1] + calls.end[call] - calls.begin[call], row[2] + calls.own[call]]);
    const end = Math.min(calls.end[call], endOf(life));
    busy += Math.max(0, end - Math.max(calls.begin[call], until));
    until = Math.max(until, end);
  }
  const table = [...rows].map(([f, row]) => [functions[f].name, ...row]).sort((a, b) => b[3] - a[3]);
  table.push(["(in none of them)", "", "", duration(life) - busy]);
  const most = Math.max(...table.map((row) => row[3]), 1);
  $("functions").replaceChildren(
    make("tr", {}, ...["Function", "Calls", "Total", "Own", ""].map((text) => make("th", { textContent: text }))),
    ...table.map(([name, count, all, own]) => {
      const bar = make("span", { className: "bar" });
      bar.style.width = `${Math.round(100 * own / most)}px`;
      return make("tr", {}, make("td", { textContent: name }), make("td", { className: "number", textContent: count ?? "-" }),
        all === "" ? make("td") : timed("td", all), timed("td", own), make("td", {}, bar));
    }));
}

/** All fields at the hop, and for each the values that it has had. */
function showFields() {
  const own = eventsOf[picked];
  if (!own.length) return $("fields").replaceChildren();
  const now = new Set(steps[hop].map(([field]) => field));
  const event = own[hop];
  $("hop").textContent = `${events.isReturn[event] ? "when" : "at the call of"} ${nameOfFunction(event)}()`
    + `${events.isReturn[event] ? " returned" : ""}, ${time(events.time[event] - lives.begin[picked])}`;
  const rows = [...stateAt(picked, hop)].filter(([field]) => !$("changed").checked || past.has(field));
  $("fields").replaceChildren(
    make("tr", {}, ...["Field", "Value", "All its values"].map((text) => make("th", { textContent: text }))),
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
    title: nameOfFunction(eventsOf[picked][i]), textContent: value ?? "?" }));
  const arrowed = buttons.flatMap((button, i) => i ? ["→ ", button] : [button]);
  return [from ? "… → " : "", ...arrowed, from + near.length < all.length ? "→ …" : ""];
}

// ---- Start -------------------------------------------------------------------------------------------

document.title = $("title").textContent = `struct ${data.type} on Linux ${data.release}`;
$("totals").textContent = `${total.lives} objects, ${total.events} events, ${time(last)}`;
$("ledger").replaceChildren(...data.parts.map(([count, meaning]) => make("tr", {},
  make("td", { className: "number", textContent: count ?? "-" }), make("td", { textContent: meaning }))));
for (const cpu of [...new Set(events.cpu)].sort((a, b) => a - b)) $("cpu").add(new Option(cpu, cpu));
const used = new Set(events.function);
functions.map(({ name }, i) => [name, i]).filter(([, i]) => used.has(i)).sort()
  .forEach(([name, i]) => $("function").add(new Option(name, i)));
for (const control of Object.values(filters)) control.addEventListener("input", filter);
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("changed").addEventListener("input", showFields);
for (const button of document.querySelectorAll("[data-key]"))
  button.addEventListener("click", () => { order = button.dataset.key; filter(); });
filter();
const [, life, at] = location.hash.match(/^#(\d+)\.(\d+)$/) ?? [];
if (+life < total.lives) pick(+life, Math.min(+at, Math.max(eventsOf[life].length - 1, 0)));
else if (found.length) pick(found[0]);
