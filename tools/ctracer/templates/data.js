"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const { functions } = data;

/** Columns with these names, out of rows: each an object, or a list in this order. */
const columns = (rows, names) => Object.fromEntries(names.map((name, i) =>
  [name, rows.map((row) => Array.isArray(row) ? row[i] : row[name])]));
const lives = columns(data.lives, ["address", "generation", "parent", "link", "begin", "end"]);
const calls = columns(data.calls, ["begin", "end", "own", "entry", "exit"]);
const events = columns(data.events.map(([place, object, ...said]) => [...place, ...object, ...said]),
  ["time", "cpu", "thread", "isReturn", "function", "argument", "depth", "life", "readable", "call", "value",
    "arguments", "fields", "changes"]);
const total = { lives: data.lives.length, events: data.events.length };
const last = total.events ? events.time[total.events - 1] : 0;

// ---- What belongs together -------------------------------------------------------------------

const eventsOf = Array.from({ length: total.lives }, () => []);
events.life.forEach((life, event) => eventsOf[life].push(event));
const childrenOf = Array.from({ length: total.lives }, () => []);
lives.parent.forEach((parent, life) => parent !== null && childrenOf[parent].push(life));

/** Where no life of the type has a known end, a life lasts up to its last event; else, one that has
 *  not ended lasts up to the end of the trace. */
const haveEnds = lives.end.some((end) => end !== null);
const lastOf = (life) => events.time[eventsOf[life].at(-1)] ?? lives.begin[life];
const endOf = (life) => lives.end[life] ?? (haveEnds ? Math.max(lives.begin[life], last) : lastOf(life));
const duration = (life) => endOf(life) - lives.begin[life];
const nameOf = (life) => `${data.type} ${lives.address[life]} #${lives.generation[life]}`;

const nameOfFunction = (event) => functions[events.function[event]].name;

/** What an event says about fields: for each, its name, its value before (of a life's first event,
 *  there is none), and its value. */
const valuesOf = (event) => events.changes[event]
  .concat(events.fields[event].map(([field, value]) => [field, undefined, value]));

/** The fields of a life after its event number `hop`: a Map from the name to the value. */
const stateAt = (life, hop) => new Map(eventsOf[life].slice(0, hop + 1)
  .flatMap((event) => valuesOf(event).map(([field, , value]) => [field, value])));

/** What an I/O is about: its operation, sector and size where it is submitted; for one that is not
 *  submitted itself, as a part of another, the last ones that are not 0. */
const ABOUT = {
  bio: [["bi_opf", "bi_iter.bi_sector", "bi_iter.bi_size"], /^submit_bio/],
  request: [["cmd_flags", "__sector", "__data_len"], /^blk_mq_start_request$/],
};
const [about, submits] = ABOUT[data.type] ?? [[], /^$/];
const described = new Map();
function describe(life) {
  if (described.has(life)) return described.get(life);
  const values = about.map(() => "");
  for (const event of eventsOf[life]) {
    for (const [field, , value] of valuesOf(event)) {
      const at = about.indexOf(field);
      if (at >= 0 && (value !== "0" || !values[at])) values[at] = value;
    }
    if (submits.test(nameOfFunction(event))) break;
  }
  const [operation, sector, bytes] = values;
  const first = eventsOf[life].length ? nameOfFunction(eventsOf[life][0]) : "";
  described.set(life, operation ? `${operation.split("|")[0].replace("REQ_OP_", "")} ${sector}+${bytes / 512}` : first);
  return described.get(life);
}
