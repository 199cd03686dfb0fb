
// ---- The timeline -----------------------------------------------------------------------------------

const timeline = $("timeline");
/** So many objects made of this one are drawn. */
const RELATED = 30;

/** The times of all that is known of the object. */
function whole() {
  const lastCall = callsOf(picked).reduce((end, call) => Math.max(end, call.end), picked.end ?? lastOf(picked));
  return [picked.begin, Math.max(lastCall, picked.begin + 1)];
}

/** Gaps of one part that follow each other are one. */
function stretches(life) {
  const found = [];
  for (const gap of gapsOf(life)) {
    const last = found.at(-1);
    if (last && nameOfGap(last) === nameOfGap(gap) && last.to === gap.from) last.to = gap.to;
    else if (gap.to > gap.from) found.push({ ...gap });
  }
  return found;
}

/** Where nothing of the object is in view, the way back. */
function wayBack() {
  const button = make("button", { type: "button", textContent: "Nothing of this object is here: show its whole life",
    onclick: showWhole });
  return make("div", { className: "nothing" }, button);
}

function drawTimeline() {
  const drawn = [], children = picked?.children ?? [], start = picked?.begin ?? 0;
  const percent = (t) => Math.min(Math.max(100 * (t - view[0]) / (view[1] - view[0]), -0.2), 100.2);
  const draw = (className, top, from, to, properties, colour = "none") => {
    const left = percent(from), right = percent(to);
    if (right < 0 || left > 100 || from > view[1] || to < view[0]) return;
    const element = make("div", { className, ...properties });
    element.style.cssText = `top: ${top}px; left: ${left}%; width: ${right - left}%; background: ${colour}`;
    drawn.push(element);
  };
  const label = (top, textContent) => draw("label", top, view[0], view[1], { textContent });

  const least = (view[1] - view[0]) / Math.max(timeline.clientWidth / 110, 1), power = 10 ** Math.floor(Math.log10(least));
  const tick = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least);
  for (let t = Math.ceil((view[0] - start) / tick) * tick; t + start < view[1]; t += tick)
    draw("tick", 0, t + start, view[1], { textContent: time(Math.round(t)) });

  let y = 22;
  const gaps = (top, life) => stretches(life).forEach((gap) => {
    const { part, from, to, at } = gap, isOwn = life === picked;
    const shown = Math.min(to, view[1]) - Math.max(from, view[0]);
    const wide = shown / (view[1] - view[0]) * timeline.clientWidth;
    const text = `${nameOfGap(gap)} ${time(to - from)}`, short = part?.letter ?? "";
    const title = `${isOwn ? "" : `${life.link} ${nameOf(life)}: `}${titleOfGap(gap)}, ${time(to - from)}`;
    draw(`part${part ? "" : " none"}`, top, from, to, { life: isOwn ? undefined : life, at, title,
      textContent: wide < 10 ? "" : wide < 6.5 * text.length + 6 ? short : text }, part?.rgb ?? "");
  });
  if (picked && $("parts").hidden === false) {
    gaps(y, picked);
    y += 22;
  }
  for (const [thread, among] of Map.groupBy(picked ? callsOf(picked) : [], (call) => call.entry.thread)) {
    let deepest = 0;
    label(y, thread);
    for (const call of among) {
      const { depth, cpu, function: { name, prototype } } = call.entry, level = depth - shallowest.get(thread);
      const title = `${prototype}\n${time(call.end - call.begin)} on CPU ${cpu}`;
      draw("box", y + 16 + 17 * level, call.begin, call.end, { call, title, textContent: name },
        `var(--box${functions.indexOf(call.entry.function) % 3})`);
      deepest = Math.max(deepest, level);
    }
    y += 16 + 17 * (deepest + 1) + 6;
  }
  if (children.length) {
    label(y, `objects made of this one${children.length > RELATED ? `, the first ${RELATED} of ${children.length}` : ""}`);
    children.slice(0, RELATED).forEach((life, i) => {
      draw("related", y + 16 + 17 * i, life.begin, endOf(life), { life,
        title: `${life.link} ${nameOf(life)}: ${time(duration(life))}` }, "var(--box0)");
      gaps(y + 16 + 17 * i, life);
    });
    y += 20 + 17 * Math.min(children.length, RELATED);
  }
  const now = picked?.events[hop]?.time;
  if (now !== undefined) draw("now", 0, now, now, {}, "#e02020");
  const all = picked ? whole() : view;
  if (all[1] < view[0] || all[0] > view[1]) drawn.push(wayBack());
  $("whole").disabled = all.every((time, i) => time === view[i]);
  timeline.style.height = `${y + 2}px`;
  timeline.replaceChildren(...drawn);
}

function showWhole() {
  if (picked) view = whole();
  drawTimeline();
}

/** Shows so many times the time around one that stays in its place. */
function zoom(factor, at) {
  if ((view[1] - view[0]) * factor >= 10) view = view.map((t) => at + (t - at) * factor);
  drawTimeline();
}
/** Around the event that is picked, where it is in view. */
function zoomHere(factor) {
  const now = picked?.events[hop]?.time, middle = (view[0] + view[1]) / 2;
  zoom(factor, now >= view[0] && now <= view[1] ? now : middle);
}
$("whole").addEventListener("click", showWhole);
$("in").addEventListener("click", () => zoomHere(0.5));
$("out").addEventListener("click", () => zoomHere(2));

/** How far the pointer has moved since it was pressed: a drag is no click. */
let dragged = 0;
timeline.addEventListener("pointerdown", () => { dragged = 0; });
timeline.addEventListener("pointermove", (event) => {
  if (!event.buttons) return;
  dragged += Math.abs(event.movementX);
  const moved = event.movementX / timeline.clientWidth * (view[1] - view[0]);
  view = view.map((t) => t - moved);
  drawTimeline();
});
timeline.addEventListener("click", (event) => {
  const { life, call, at } = event.target;
  if (dragged > 4) return;
  if (life) pick(life);
  else if (at !== undefined) pickHop(at);
  else if (call) pickHop(picked.events.findIndex((found) => found.call === call));
});
timeline.addEventListener("wheel", (event) => {
  event.preventDefault();
  const { left, width } = timeline.getBoundingClientRect();
  zoom(event.deltaY < 0 ? 0.8 : 1.25, view[0] + (event.clientX - left) / width * (view[1] - view[0]));
}, { passive: false });
timeline.addEventListener("dblclick", showWhole);
addEventListener("resize", drawTimeline);
