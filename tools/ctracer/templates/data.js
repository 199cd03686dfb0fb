"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const { lives, events, calls, functions, threads, names, strings } = data;
const total = { lives: lives.begin.length, events: events.time.length };
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

/** What each event of a life changed: for each a list of [field, value before, value after]. */
function stepsOf(life) {
  const state = new Map();
  return eventsOf[life].map((event) => {
    const step = [];
    const pairs = data.fields[event] ?? data.changes[event] ?? [];
    for (let i = 0; i < pairs.length; i += 2) {
      if (!data.fields[event]) step.push([pairs[i], state.get(pairs[i]), pairs[i + 1]]);
      state.set(pairs[i], pairs[i + 1]);
    }
    return step;
  });
}

/** The fields of a life after its event number `hop`: a Map from the name to the value. */
function stateAt(life, hop) {
  const state = new Map();
  for (const event of eventsOf[life].slice(0, hop + 1)) {
    const pairs = data.fields[event] ?? data.changes[event] ?? [];
    for (let i = 0; i < pairs.length; i += 2) state.set(pairs[i], pairs[i + 1]);
  }
  return state;
}

/** What an I/O is about: its operation, sector and size where it is submitted; for one that is not
 *  submitted itself, as a part of another, the last ones that are not 0. */
const ABOUT = {
  bio: [["bi_opf", "bi_iter.bi_sector", "bi_iter.bi_size"], /^submit_bio/],
  request: [["cmd_flags", "__sector", "__data_len"], /^blk_mq_start_request$/],
};
const [about, submits] = ABOUT[data.type] ?? [[], /^$/];
const positions = about.map((name) => names.indexOf(name));
const described = new Map();
function describe(life) {
  if (described.has(life)) return described.get(life);
  const values = about.map(() => "");
  for (const event of eventsOf[life]) {
    const pairs = data.fields[event] ?? data.changes[event] ?? [];
    for (let i = 0; i < pairs.length; i += 2) {
      const at = positions.indexOf(pairs[i]);
      if (at >= 0 && (strings[pairs[i + 1]] !== "0" || !values[at])) values[at] = strings[pairs[i + 1]];
    }
    if (submits.test(functions[events.function[event]][0])) break;
  }
  const [operation, sector, bytes] = values;
  const first = eventsOf[life].length ? functions[events.function[eventsOf[life][0]]][0] : "";
  described.set(life, operation ? `${operation.split("|")[0].replace("REQ_OP_", "")} ${sector}+${bytes / 512}` : first);
  return described.get(life);
}
