"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const { functions, lives } = data;
const calls = data.calls.map(([begin, end, own, entry, exit]) => ({ begin, end, own, entry, exit }));
const events = data.events.map(([[time, cpu, thread, isReturn, name], [argument, depth, life, readable, call], value,
  others, fields, changes]) => ({ time, cpu, thread, isReturn, function: functions[name], argument, depth,
  life: lives[life], readable, call: calls[call], value, others, fields, changes }));

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
const nameOf = (life) => `${data.type} ${life.address} #${life.generation}`;
const callsOf = (life) => [...new Set(life.events.map((event) => event.call))].filter((call) => call);

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
  return operation ? `${operation.split("|")[0].replace("REQ_OP_", "")} ${sector}+${bytes / 512}`
    : life.events[0]?.function.name ?? "";
}
