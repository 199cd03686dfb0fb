
// ---- The timeline -----------------------------------------------------------------------------------

const canvas = document.getElementById("timeline");
/** So many objects made of this one are drawn. */
const RELATED = 30;
let boxes = [];

function drawTimeline() {
  const width = canvas.clientWidth, style = getComputedStyle(document.body);
  const lanes = new Map();
  const own = picked < 0 ? [] : callsOf(picked);
  for (const call of own) {
    const lane = lanes.get(threadOf.get(call)) ?? { from: Infinity, to: 0 };
    lane.from = Math.min(lane.from, depthOf.get(call));
    lane.to = Math.max(lane.to, depthOf.get(call));
    lanes.set(threadOf.get(call), lane);
  }
  let y = 22;
  for (const lane of lanes.values()) { lane.y = y + 16; y = lane.y + (lane.to - lane.from + 1) * 17 + 6; }
  const related = picked < 0 ? [] : childrenOf[picked].slice(0, RELATED);
  const relatedTop = y + 14;
  if (related.length) y = relatedTop + related.length * 8 + 4;
  canvas.style.height = `${y + 2}px`;
  canvas.width = width * devicePixelRatio;
  canvas.height = (y + 2) * devicePixelRatio;
  const draw = canvas.getContext("2d");
  draw.scale(devicePixelRatio, devicePixelRatio);
  draw.font = "11px system-ui, sans-serif";
  const x = (t) => (t - view[0]) / (view[1] - view[0]) * width;
  draw.fillStyle = style.color;
  draw.globalAlpha = 0.6;
  const raw = (view[1] - view[0]) / Math.max(width / 110, 1), power = 10 ** Math.floor(Math.log10(raw));
  const tick = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const start = picked < 0 ? 0 : lives.begin[picked];
  for (let t = Math.ceil((view[0] - start) / tick) * tick; t + start < view[1]; t += tick) {
    draw.fillRect(x(t + start), 0, 1, y);
    draw.fillText(time(Math.round(t)), x(t + start) + 3, 11);
  }
  for (const [thread, lane] of lanes) draw.fillText(thread, 3, lane.y - 4);
  if (related.length) {
    const more = childrenOf[picked].length - related.length;
    draw.fillText(`objects made of this one${more ? `, the first ${RELATED} of ${RELATED + more}` : ""}`, 3, relatedTop - 3);
  }
  draw.globalAlpha = 1;
  boxes = [];
  related.forEach((life, i) => {
    const left = x(lives.begin[life]), box = { life, left, top: relatedTop + i * 8, height: 6, width: Math.max(x(endOf(life)) - left, 2) };
    boxes.push(box);
    draw.fillStyle = "#6a8fc8";
    draw.fillRect(box.left, box.top, box.width, box.height);
  });
  for (const call of own) {
    const lane = lanes.get(threadOf.get(call)), left = Math.max(x(calls.begin[call]), -1);
    const right = Math.min(x(calls.end[call]), width + 1);
    if (right < 0 || left > width) continue;
    const box = { call, left, top: lane.y + (depthOf.get(call) - lane.from) * 17, height: 16, width: Math.max(right - left, 2) };
    boxes.push(box);
    draw.fillStyle = `hsl(${(functionOf.get(call) * 47) % 360} 55% 62%)`;
    draw.fillRect(box.left, box.top, box.width, 16);
    draw.fillStyle = "#111";
    const name = functions[functionOf.get(call)].name;
    if (box.width > 24) draw.fillText(clip(draw, name, box.width - 6), box.left + 3, box.top + 12);
  }
  if (picked >= 0 && eventsOf[picked].length) {
    draw.fillStyle = "#e02020";
    draw.fillRect(x(events.time[eventsOf[picked][hop]]), 0, 1.5, y);
  }
}

function clip(draw, text, width) {
  while (text && draw.measureText(text).width > width) text = text.slice(0, -1);
  return text;
}

const under = (event) => boxes.findLast((box) => event.offsetX >= box.left && event.offsetX <= box.left + box.width
  && event.offsetY >= box.top && event.offsetY < box.top + box.height);
canvas.addEventListener("mousemove", (event) => {
  if (event.buttons) {
    const moved = event.movementX / canvas.clientWidth * (view[1] - view[0]);
    view = view.map((t) => t - moved);
    return drawTimeline();
  }
  const box = under(event);
  canvas.title = !box ? "" : box.life !== undefined ? `${lives.link[box.life]} ${nameOf(box.life)}: ${time(duration(box.life))}`
    : `${functions[functionOf.get(box.call)].prototype}\n${time(calls.end[box.call] - calls.begin[box.call])} on CPU ${cpuOf.get(box.call)}`;
});
canvas.addEventListener("click", (event) => {
  const box = under(event);
  if (box?.life !== undefined) pick(box.life);
  else if (box) pickHop(eventsOf[picked].findIndex((found) => events.call[found] === box.call));
});
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const at = view[0] + event.offsetX / canvas.clientWidth * (view[1] - view[0]);
  const factor = event.deltaY < 0 ? 0.8 : 1.25;
  if ((view[1] - view[0]) * factor >= 10) view = view.map((t) => at + (t - at) * factor);
  drawTimeline();
}, { passive: false });
canvas.addEventListener("dblclick", () => pick(picked, hop));
addEventListener("resize", drawTimeline);
