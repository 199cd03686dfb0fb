"use strict";

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const { functions, lives } = data;
const calls = data.calls.map(([begin, end, own, entry, exit]) => ({ begin, end, own, entry, exit }));
const events = data.events.map(([[time, cpu, thread, isReturn, name], [argument, depth, life, readable, call, part],
  value, others, fields, changes]) => ({ time, cpu, thread, isReturn, function: functions[name], argument, depth,
  life: lives[life], readable, call: calls[call], part, value, others, fields, changes }));
/** The parts of an I/O's time, in the colours that they have everywhere. */
const parts = data.colours.map(([name, letter, rgb]) => ({ name, letter, rgb }));

// ---- What belongs together -------------------------------------------------------------------

for (const life of lives) Object.assign(life, { parent: lives[life.parent], events: [], children: [] });
for (const life of lives) life.parent?.children.push(life);
for (const event of events) event.life.events.push(event);
for (const call of calls) call.entry = events[call.entry];

/** Events of two CPUs may stand in the wrong order. */
const last = events.reduce((most, { time }) => Math.max(most, time), 0);

/** Where no life of the type has a known end, a life lasts up to its last event; else, one that has
 *  not ended lasts up to the end of the trace. */
const haveEnds = lives.some((life) => life.end !== null);
const lastOf = (life) => life.events.at(-1)?.time ?? life.begin;
const endOf = (life) => life.end ?? (haveEnds ? Math.max(life.begin, last) : lastOf(life));
const duration = (life) => endOf(life) - life.begin;
const nameOf = (life) => `${data.type} #${life.life}`;
const callsOf = (life) => [...new Set(life.events.map((event) => event.call))].filter((call) => call);

/** The gaps between an object's events, up to its end, and the one after the last event, of one that is still in a part
 *  of its time: where each begins and ends, its part of an I/O's time, which
 *  may be none, the clone that the I/O is in for most of it, and the place of the event before it. */
const gapsOf = (life) => life.gaps ??= gapsBetween(life);
function gapsBetween(life) {
  const completed = life.events.findIndex((event) => event.function.name === "bio_endio");
  const gaps = life.events.slice(1).map((event, at) => {
    const [from, to] = [life.events[at].time, event.time].map((time) => Math.min(time, endOf(life)));
    const part = parts[event.part], canBe = !part && (completed < 0 || at < completed);
    const isIn = ({ link, begin, end }) =>
      link === "clone" && 2 * (Math.min(end ?? last, to) - Math.max(begin, from)) > to - from;
    return { from, to: Math.max(from, to), part, inside: canBe ? life.children.find(isIn) : undefined, at };
  });
  const still = life.end === null ? parts[data.still[life.life]] : undefined, from = lastOf(life);
  if (still && from < endOf(life)) gaps.push({ from, to: endOf(life), part: still, at: gaps.length, isOpen: true });
  return gaps;
}
const hasParts = (life) => gapsOf(life).some(({ part }) => part);
/** What a gap is called, and what is to be known about it. */
const nameOfGap = ({ part, inside }) => part?.name ?? (inside ? `in its clone #${inside.life}` : "");
const titleOfGap = (gap) => (gap.isOpen ? "still " : "") + partOfGap(gap);
const partOfGap = (gap) => !gap.part ? nameOfGap(gap) || "none of the parts of an I/O's time"
  : gap.part.name + (gap.part.name === "device" && data.type === "bio" ? ", with the queue before it" : "");

/** The time in each part, in each clone, and in none of them, which is the last: the time, and the longest gap. */
function sumsOf(life) {
  if (life.sums) return life.sums;
  const sums = new Map();
  for (const gap of gapsOf(life)) {
    const sum = sums.get(nameOfGap(gap)) ?? { time: 0, longest: gap };
    sums.set(nameOfGap(gap), sum);
    sum.time += gap.to - gap.from;
    if (gap.to - gap.from > sum.longest.to - sum.longest.from) sum.longest = gap;
  }
  return life.sums = [...sums.values()].filter((sum) => sum.time).sort((a, b) => b.time - a.time);
}
/** The part that most of the time went to, where the object has any: of one that waits for its clone, the clone's. */
function mainPart(life) {
  if (life.main !== undefined) return life.main;
  life.main = null; // damaged files have circles
  const { part, inside } = sumsOf(life)[0]?.longest ?? {};
  return life.main = part ?? (inside ? mainPart(inside) : null);
}

/** What an event says about fields: for each, its name, its value before (of a life's first event,
 *  there is none), and its value. */
const valuesOf = (event) => event.changes.concat(event.fields.map(([field, value]) => [field, undefined, value]));

/** What an I/O is about: its operation, sector and size where it is submitted; for one that is not
 *  submitted itself, as a part of another, the last ones that are not 0. */
const ABOUT = {
  bio: [["bi_opf", "bi_iter.bi_sector", "bi_iter.bi_size"], /^submit_bio/],
  request: [["cmd_flags", "__sector", "__data_len"], /^blk_mq_start_request$/],
};
const [about, submits] = Object.hasOwn(ABOUT, data.type) ? ABOUT[data.type] : [[], /^$/];
const describe = (life) => life.about ??= description(life);
function description(life) {
  const values = about.map(() => "");
  for (const event of life.events) {
    for (const [field, , value] of valuesOf(event)) {
      const at = about.indexOf(field);
      if (at >= 0 && (value !== "0" || !values[at])) values[at] = value;
    }
    if (submits.test(event.function.name)) break;
  }
  const [operation, sector, bytes] = values;
  // A flush has no sector.
  const place = sector === "18446744073709551615" ? "" : ` ${sector}+${bytes / 512}`;
  return operation ? operation.split("|")[0].replace("REQ_OP_", "") + place
    : life.events[0]?.function.name ?? "";
}
