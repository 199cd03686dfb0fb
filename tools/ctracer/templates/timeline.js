
// ---- The timeline -----------------------------------------------------------------------------------

const timeline = document.getElementById("timeline");
/** So many objects made of this one are drawn. */
const RELATED = 30;

function drawTimeline() {
  const drawn = [], children = picked?.children ?? [], start = picked?.begin ?? 0;
  const percent = (t) => Math.min(Math.max(100 * (t - view[0]) / (view[1] - view[0]), -1), 101);
  const draw = (className, top, from, to, properties, colour = "none") => {
    const left = percent(from), right = percent(to);
    if (right < 0 || left > 100) return;
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
  for (const [thread, among] of Map.groupBy(picked ? callsOf(picked) : [], (call) => call.entry.thread)) {
    let deepest = 0;
    label(y, thread);
    for (const call of among) {
      const { depth, cpu, function: { name, prototype } } = call.entry, level = depth - shallowest.get(thread);
      const title = `${prototype}\n${time(call.end - call.begin)} on CPU ${cpu}`;
      draw("box", y + 16 + 17 * level, call.begin, call.end, { call, title, textContent: name },
        `hsl(${(functions.indexOf(call.entry.function) * 47) % 360} 55% 62%)`);
      deepest = Math.max(deepest, level);
    }
    y += 16 + 17 * (deepest + 1) + 6;
  }
  if (children.length) {
    label(y, `objects made of this one${children.length > RELATED ? `, the first ${RELATED} of ${children.length}` : ""}`);
    children.slice(0, RELATED).forEach((life, i) => draw("related", y + 16 + 8 * i, life.begin, endOf(life),
      { life, title: `${life.link} ${nameOf(life)}: ${time(duration(life))}` }, "#6a8fc8"));
    y += 20 + 8 * Math.min(children.length, RELATED);
  }
  const now = picked?.events[hop]?.time;
  if (now !== undefined) draw("now", 0, now, now, {}, "#e02020");
  timeline.style.height = `${y + 2}px`;
  timeline.replaceChildren(...drawn);
}

timeline.addEventListener("mousemove", (event) => {
  if (!event.buttons) return;
  const moved = event.movementX / timeline.clientWidth * (view[1] - view[0]);
  view = view.map((t) => t - moved);
  drawTimeline();
});
timeline.addEventListener("click", (event) => {
  const { life, call } = document.elementFromPoint(event.clientX, event.clientY);
  if (life) pick(life);
  else if (call) pickHop(picked.events.findIndex((found) => found.call === call));
});
timeline.addEventListener("wheel", (event) => {
  event.preventDefault();
  const { left, width } = timeline.getBoundingClientRect();
  const at = view[0] + (event.clientX - left) / width * (view[1] - view[0]), factor = event.deltaY < 0 ? 0.8 : 1.25;
  if ((view[1] - view[0]) * factor >= 10) view = view.map((t) => at + (t - at) * factor);
  drawTimeline();
}, { passive: false });
timeline.addEventListener("dblclick", () => picked && pick(picked, hop));
addEventListener("resize", drawTimeline);
