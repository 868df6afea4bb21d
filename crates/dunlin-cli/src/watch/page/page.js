"use strict";
// Shows /status.json once per second. Names may come from peers, so every text is inserted as
// text; the page's policy forbids everything else.

const SAMPLES = 120;          // the curves cover two minutes
const CARDS = 40;             // more migrations are only counted
const STALLED_S = 10;
const DAY_S = 86400;
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

// ---- Numbers ---------------------------------------------------------------------------------

function scaled(value, units, base) {
  let unit = 0;
  while (value >= base && unit < units.length - 1) { value /= base; unit += 1; }
  const digits = value >= 100 || unit === 0 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[unit]}`;
}
const bytes = (value) => scaled(value, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
const rate = (value) => `${bytes(value)}/s`;
function time(seconds) {
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 2 * DAY_S ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / DAY_S)} days`;
}
const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

// ---- Elements --------------------------------------------------------------------------------

function make(name, settings, ...children) {
  const one = document.createElement(name);
  for (const [key, value] of Object.entries(settings || {})) {
    if (key === "text") one.textContent = value; else one.setAttribute(key, value);
  }
  one.append(...children);
  return one;
}
function draw(name, settings) {
  const one = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(settings)) one.setAttribute(key, value);
  return one;
}
function setText(element, text) { if (element.textContent !== text) element.textContent = text; }

// Keeps one child for each item, in order. Children that stay are updated in place, so focus,
// selection and screen readers stay where they are.
function keyed(parent, items, keyOf, create, update) {
  const seen = new Map();
  const keys = items.map((item) => {
    const key = keyOf(item);
    seen.set(key, (seen.get(key) || 0) + 1);
    return `${key} #${seen.get(key)}`;
  });
  const wanted = new Set(keys);
  const old = new Map();
  for (const child of Array.from(parent.children)) {
    if (wanted.has(child.dataset.key)) old.set(child.dataset.key, child); else child.remove();
  }
  let next = parent.firstElementChild;
  items.forEach((item, at) => {
    let child = old.get(keys[at]);
    if (!child) { child = create(item); child.dataset.key = keys[at]; }
    if (child === next) next = next.nextElementSibling; else parent.insertBefore(child, next);
    update(child, item);
  });
}
function facts(list, pairs) {
  keyed(list, pairs, ([name]) => name,
    ([name]) => make("div", {}, make("dt", { text: name }), make("dd")),
    (child, [, value]) => setText(child.lastElementChild, value));
}

// A table: columns are [heading, is a number, text or function that fills the cell].
function table(parent, caption, columns, rows, keyOf) {
  if (!parent.firstElementChild) {
    const heads = columns.map(([name, number]) =>
      make("th", { scope: "col", role: "columnheader", class: number ? "number" : "", text: name }));
    parent.append(make("table", { role: "table" }, make("caption"),
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...heads)),
      make("tbody", { role: "rowgroup" })));
  }
  const body = parent.querySelector("tbody");
  if (caption) setText(parent.querySelector("caption"), caption);
  keyed(body, rows, keyOf,
    () => make("tr", { role: "row" }, ...columns.map(([name, number]) =>
      make("td", { role: "cell", class: number ? "number" : "", "data-label": name }))),
    (row, item) => columns.forEach(([, , content], at) => {
      const cell = row.children[at];
      const text = content(item, cell);
      if (typeof text === "string") setText(cell, text);
    }));
}

// ---- Rates and curves ------------------------------------------------------------------------

const before = new Map();     // counter -> [value, clock, rate]
const series = new Map();     // name -> samples
let touched = new Set();

// The rate of a counter since the last sample; null for a counter that is new or went back.
function rateOf(name, value, clock) {
  touched.add(name);
  const last = before.get(name);
  if (last && last[1] === clock) return last[2];
  const known = last && value >= last[0] && clock > last[1];
  const result = known ? (value - last[0]) / (clock - last[1]) : null;
  before.set(name, [value, clock, result]);
  return result;
}
function sample(name, value) {
  touched.add(name);
  const samples = series.get(name) || [];
  samples.push(value === null ? 0 : value);
  if (samples.length > SAMPLES) samples.shift();
  series.set(name, samples);
  return samples;
}
function forget(current) {
  for (const map of [before, series]) {
    for (const name of map.keys()) if (!touched.has(name)) map.delete(name);
  }
  for (const key of moves.keys()) if (!current.has(key)) moves.delete(key);
  touched = new Set();
}

function plot(kind, small) {
  const svg = draw("svg", { viewBox: "0 0 120 40", preserveAspectRatio: "none", role: "img", class: small ? "small" : "" });
  for (const one of kind.split(" ")) {
    svg.append(draw("path", { class: `area ${one}` }), draw("path", { class: `curve ${one}` }));
  }
  return svg;
}
// Draws series into a plot, all with the same scale.
function curves(svg, all, label, format) {
  const most = Math.max(1, ...all.flat());
  all.forEach((samples, at) => {
    const start = SAMPLES - samples.length;
    const points = samples.map((value, x) => `${start + x} ${(39 - value / most * 37).toFixed(2)}`);
    const line = `M${points.join("L")}`;
    svg.children[2 * at].setAttribute("d", `${line}L${SAMPLES - 1} 40L${start} 40Z`);
    svg.children[2 * at + 1].setAttribute("d", line);
  });
  const last = all.map((samples) => format(samples[samples.length - 1])).join(" and ");
  svg.setAttribute("aria-label", `${label}: now ${last}, at most ${format(most === 1 ? 0 : most)} in the last ${time(all[0].length)}`);
  return most;
}
function figure(title, svg) {
  return make("figure", {}, make("figcaption", {}, make("span", { text: title }), make("span")), svg);
}
const captionOf = (svg) => svg.parentElement.firstElementChild.lastElementChild;

function lanes(list, items) {
  // Each direction has its own shares.
  const sums = {};
  for (const lane of items) sums[lane.kind] = (sums[lane.kind] || 0) + lane.value;
  keyed(list, items, (lane) => lane.key,
    (lane) => make("li", {}, make("span", { text: lane.name }),
      make("span", { class: `track ${lane.kind}`, "aria-hidden": "true" }, make("i")), make("span"), make("span", { class: "hide" })),
    (child, lane) => {
      const sum = sums[lane.kind];
      const share = sum > 0 ? lane.value / sum * 100 : 0;
      child.children[1].firstElementChild.style.width = `${share.toFixed(1)}%`;
      setText(child.children[2], `${share.toFixed(0)} %`);
      // The pointer shows the title, and a screen reader reads the hidden text.
      child.title = lane.title;
      setText(child.lastElementChild, `: ${lane.title}`);
    });
}

// ---- Migrations under way --------------------------------------------------------------------

const progressOf = (session) => session.live && session.live.migration && session.live.migration.progress;
const keyOf = (session) => `${session.live ? session.live.pid : 0} ${session.uuid} ${session.role}`;
const moves = new Map();      // session -> [progress, when it last changed]

function isStalled(session) {
  const progress = progressOf(session);
  if (!progress || session.live.migration.phase !== "pre-copy") return false;
  const state = JSON.stringify([progress.iteration, progress.remaining_bytes, progress.lanes]);
  const last = moves.get(keyOf(session));
  const seconds = session.live.migration.seconds;
  if (!last || last[0] !== state) { moves.set(keyOf(session), [state, seconds]); return false; }
  return seconds - last[1] >= STALLED_S;
}

function sessionCard() {
  const card = make("article", { class: "card" },
    make("div", { class: "top" }, make("h3"), make("span", { class: "soft" })),
    make("dl", { class: "facts" }),
    make("div", { class: "plots" }),
    make("div", {}, make("h4", { text: "Lanes, share of the bytes" }), make("ul", { class: "lanes" })));
  const plots = card.children[2];
  plots.append(figure("Rate", plot("sent")), figure("Remaining", plot("received")));
  const iterations = draw("svg", { viewBox: "0 0 120 40", preserveAspectRatio: "none", role: "img" });
  plots.append(figure("Iterations", iterations));
  return card;
}
function updateSession(card, session) {
  const migration = (session.live && session.live.migration) || {};
  const progress = progressOf(session);
  const away = session.role === "source";
  setText(card.querySelector("h3"), session.vm || "(not named yet)");
  const other = session.peer ? `${away ? "to" : "from"} ${session.peer} · ` : "";
  setText(card.querySelector(".soft"), other + session.phase);
  card.classList.toggle("attention", session.resolvable || isStalled(session) || migration.throttle >= 50);
  const pairs = migration.phase ? [["for", time(migration.seconds)]] : [];
  if (progress) {
    pairs.push(["rate", rate(progress.bytes_per_s)], ["remaining", bytes(progress.remaining_bytes)],
      ["dirty", progress.iteration > 1 ? rate(progress.dirty_pages_per_s * 4096) : "unknown"], ["iteration", String(progress.iteration)],
      ["downtime now", progress.predicted_downtime_ms ? time(progress.predicted_downtime_ms / 1e3) : "unknown"]);
  } else if (session.live) pairs.push(["memory", bytes(session.live.memory_bytes)]);
  if (migration.throttle) pairs.push(["slowed by", `${migration.throttle} %`]);
  if (migration.rate) pairs.push(["capped at", rate(migration.rate)]);
  if (migration.lanes_lost) pairs.push(["lanes lost", String(migration.lanes_lost)]);
  const again = ((progress && progress.retransmits) || []).reduce((all, [, segments]) => all + segments, 0);
  if (again) pairs.push(["sent again", count(again, "segment")]);
  facts(card.querySelector(".facts"), pairs);
  card.children[2].hidden = card.children[3].hidden = !progress;
  if (!progress) return;
  const [speed, left, passes] = card.querySelectorAll("svg");
  const key = keyOf(session);
  setText(captionOf(speed), `max. ${rate(curves(speed, [sample(`${key} rate`, progress.bytes_per_s)], "Rate", rate))}`);
  setText(captionOf(left), `max. ${bytes(curves(left, [sample(`${key} left`, progress.remaining_bytes)], "Remaining", bytes))}`);
  drawIterations(passes, migration.iterations || []);
  lanes(card.querySelector(".lanes"), progress.lanes.map(([lane, value]) => {
    const speed = rateOf(`${key} lane ${lane}`, value, migration.seconds);
    const again = new Map(progress.retransmits || []).get(lane) || 0;
    return { key: String(lane), name: `lane ${lane}`, kind: "", value,
      title: `${bytes(value)}${speed === null ? "" : `, ${rate(speed)}`}, ${count(again, "retransmit")}` };
  }));
}
function drawIterations(svg, all) {
  const shown = all.slice(-16);
  const most = Math.max(1, ...shown.flatMap((one) => [one.wire_bytes, one.dirtied_pages * 4096]));
  const width = 120 / Math.max(8, shown.length);
  const bar = (kind, at, value) => {
    const height = value / most * 38;
    return draw("rect", { class: kind, x: at, y: 40 - height, width: width * 0.38, height });
  };
  svg.replaceChildren(...shown.flatMap((one, at) => [
    bar("wire", at * width + width * 0.08, one.wire_bytes),
    bar("dirtied", at * width + width * 0.5, one.dirtied_pages * 4096)]));
  const last = shown[shown.length - 1];
  const caption = captionOf(svg);
  if (!caption.firstElementChild) {
    caption.append(make("span", { class: "swatch sent-key", "aria-hidden": "true" }), "sent",
      make("span", { class: "swatch dirty-key", "aria-hidden": "true" }), "dirtied");
  }
  svg.setAttribute("aria-label", last ? `Iteration ${last.iteration}: ${bytes(last.wire_bytes)} sent, ${bytes(last.dirtied_pages * 4096)} dirtied meanwhile` : "The first iteration is under way");
}

// ---- Tunnels and IPsec -----------------------------------------------------------------------

// The name of a peer without its fingerprint.
const shortName = (peer) => peer.split(" (sha256")[0];

function tunnelCard() {
  return make("article", { class: "card" },
    make("div", { class: "top" }, make("h3"), make("span", { class: "soft" })),
    make("div", { class: "routes" }), make("div", { class: "peers" }));
}
function updateTunnel(card, tunnel) {
  const of = `tunnel ${tunnel.pid}`;
  setText(card.querySelector("h3"), tunnel.name);
  const lost = tunnel.lanes_lost ? ` · ${count(tunnel.lanes_lost, "lane")} lost so far` : "";
  setText(card.querySelector(".soft"), `for ${time(tunnel.running_s)} · peers connect to ${tunnel.address}${lost}`);
  card.classList.toggle("attention", alertsOfTunnel(tunnel).length > 0);
  table(card.children[1], `Routes of ${tunnel.name}`, [
    ["Route", false, (route, cell) => { cell.className = "key"; return route.route; }],
    ["To or target", false, (route) => route.to || route.target || ""],
    ["Channels", true, (route) => String(route.channels)],
    ["Sent", true, (route) => rate(route.read_bytes_per_s)],
    ["Received", true, (route) => rate(route.written_bytes_per_s)],
    ["Two minutes", false, (route, cell) => {
      const svg = cell.firstElementChild || cell.appendChild(plot("sent received", true));
      curves(svg, [sample(`${of} ${route.route} out`, route.read_bytes_per_s),
        sample(`${of} ${route.route} in`, route.written_bytes_per_s)], "Sent and received", rate);
    }],
    ["Total", true, (route) => `${bytes(route.read_bytes)} / ${bytes(route.written_bytes)}`],
    ["Ended", true, (route) => `${route.closed + route.left_unread + route.failed}${route.failed ? ` (${route.failed} failed)` : ""}`],
  ], tunnel.routes, (route) => route.route);
  card.children[2].hidden = tunnel.peers.length === 0;
  table(card.children[2], `Peers of ${tunnel.name}, and the shares of their lanes in the bytes of the last second`, [
    ["Peer", false, (peer, cell) => { cell.className = "key"; cell.title = peer.peer; return shortName(peer.peer); }],
    ["Address", false, (peer) => peer.at],
    ["Waiting here", true, (peer) => bytes(peer.held_bytes)],
    ["Not confirmed", true, (peer) => bytes(peer.unacknowledged_bytes)],
    ["Sent again", true, (peer) => String(peer.by_lane.reduce((all, lane) => all + lane.retransmits, 0))],
    ["Lanes", false, (peer, cell) => peerLanes(cell, `${of} ${peer.at}`, peer, tunnel.running_s)],
  ], tunnel.peers, (peer) => `${peer.peer} ${peer.at}`);
}
function peerLanes(cell, of, peer, clock) {
  const list = cell.firstElementChild || cell.appendChild(make("ul", { class: "lanes" }));
  const rates = peer.by_lane.map((lane) => ({ lane, speed: rateOf(`${of} ${lane.direction} ${lane.lane}`, lane.bytes, clock) }));
  lanes(list, rates.map(({ lane, speed }) => ({
    key: `${lane.direction} ${lane.lane}`, name: `${lane.direction === "sent" ? "out" : "in"} ${lane.lane}`, kind: lane.direction,
    value: speed || 0, title: `${bytes(lane.bytes)}${speed === null ? "" : `, ${rate(speed)}`}, ${count(lane.retransmits, "retransmit")}`,
  })));
}
function updateIpsec(card, session) {
  setText(card.querySelector("h3"), session.peer);
  setText(card.querySelector(".soft"), `ports ${session.ports || "unknown"} · ${session.mode || ""} · ${session.up ? "up" : "not up"}`);
  card.classList.toggle("attention", !session.up);
  table(card.children[1], `SAs with ${session.peer}`, [
    ["Direction", false, (sa, cell) => { cell.className = "key"; return sa.direction; }],
    ["CPU", true, (sa) => sa.cpu === null ? "" : String(sa.cpu)],
    ["SPI", false, (sa) => `0x${sa.spi.toString(16).padStart(8, "0")}`],
    ["Bytes", true, (sa) => sa.bytes === null ? "removed" : bytes(sa.bytes)],
    ["Packets", true, (sa) => sa.packets === null ? "" : String(sa.packets)],
    ["Dropped", true, (sa) => String((sa.replayed || 0) + (sa.outside_window || 0) + (sa.not_authentic || 0))],
  ], session.associations, (sa) => `${sa.direction} ${sa.spi}`);
}

function updateHandoffs(all) {
  byId("handoffs-section").hidden = all.length === 0;
  const sum = (counts) => Object.values(counts).reduce((so, one) => so + one, 0);
  const each = (counts) => Object.entries(counts).map(([name, one]) => `${name}: ${one}`).join(", ");
  table(byId("handoffs"), "Clients since each process started", [
    ["Port", false, (one, cell) => { cell.className = "key"; return one.address; }],
    ["Handed over", true, (one) => String(sum(one.handed_over))],
    ["By name", false, (one) => each(one.handed_over)],
    ["Forwarded", true, (one) => String(one.forwarded)],
    ["Refused", true, (one) => String(sum(one.refused))],
    ["Refused for", false, (one) => each(one.refused)],
  ], all, (one) => `${one.address} ${one.pid}`);
}

// ---- The last migrations ---------------------------------------------------------------------

const PARTS = [["pause_ms", "pause"], ["last_pages_ms", "last pages"], ["state_ms", "state"], ["ready_ms", "ready"], ["resume_ms", "resume"]];

let longest = 1;              // downtime in the list, in milliseconds

function downtime(one, cell) {
  if (!one.downtime) return one.guest_downtime_ms === null ? "" : `${time(one.guest_downtime_ms / 1e3)}, by the guest`;
  // The bars of all rows have the same scale.
  if (cell.firstElementChild) {
    cell.children[1].style.width = `${one.downtime.total_ms / longest * 100}%`;
    return undefined;
  }
  const parts = PARTS.map(([key, name]) => [name, one.downtime[key]]);
  const sum = parts.reduce((all, [, ms]) => all + ms, 0) || 1;
  const bar = make("span", { class: "parts", "aria-hidden": "true" });
  for (const [, ms] of parts) {
    const part = make("i");
    part.style.width = `${(ms / sum * 100).toFixed(2)}%`;
    bar.append(part);
  }
  const words = parts.map(([name, ms]) => `${name} ${time(ms / 1e3)}`).join(", ");
  bar.title = words;
  bar.style.width = `${one.downtime.total_ms / longest * 100}%`;
  cell.append(make("span", { text: time(one.downtime.total_ms / 1e3) }), bar, make("span", { class: "hide", text: `: ${words}` }));
  return undefined;
}
function updateHistory(all) {
  byId("no-history").hidden = all.length > 0;
  const parent = byId("history");
  parent.hidden = all.length === 0;
  longest = Math.max(0.001, ...all.map((one) => (one.downtime ? one.downtime.total_ms : 0)));
  table(parent, null, [
    ["Ended", false, (one) => new Date(one.ended_ms).toLocaleString()],
    ["VM", false, (one, cell) => { cell.className = "key"; return one.vm; }],
    ["Direction", false, (one) => `${one.role === "source" ? "to" : "from"} ${one.peer}`],
    ["Result", false, (one, cell) => {
      if (cell.firstElementChild) return;
      const result = make("span", { class: one.result, text: one.fault && one.fault !== one.result ? `${one.result}: ${one.fault}` : one.result });
      // The keyboard and a finger open the reason too, unlike a title.
      cell.append(one.text ? make("details", {}, make("summary", {}, result), one.text) : result);
    }],
    ["Took", true, (one) => time(one.total_s)],
    ["Sent", true, (one) => one.wire_bytes === null ? "" : bytes(one.wire_bytes)],
    ["Iterations", true, (one) => one.iterations ? String(one.iterations) : ""],
    ["Downtime", false, downtime],
  ], all, (one) => `${one.ended_ms} ${one.vm} ${one.role}`);
  const caption = parent.querySelector("caption");
  if (caption.children.length === 0) {
    caption.append("Parts of the downtime:", ...PARTS.flatMap(([, name], at) =>
      [make("span", { class: `swatch key${at + 1}`, "aria-hidden": "true" }), name]), ". The last pages and the state overlap.");
  }
}

// ---- What needs attention --------------------------------------------------------------------

const alert = (level, text, advice) => ({ level, text, advice });

function alertsOfTunnel(tunnel) {
  const found = [];
  const of = `Tunnel ${tunnel.name}`;
  if (tunnel.redirect && tunnel.redirect.rules.state !== "applied") {
    const { state, difference } = tunnel.redirect.rules;
    found.push(alert(state === "unknown" ? "warning" : "error", `${of}: the redirect's rules are ${state}`, difference || ""));
  }
  for (const route of tunnel.routes) {
    if (route.lost) found.push(alert("error", `${of}: route ${route.route} does not listen`, route.lost));
    if (route.trouble) found.push(alert("error", `${of}: route ${route.route} cannot reach ${route.to}`, route.trouble));
  }
  for (const peer of tunnel.peers) {
    if (peer.refused) found.push(alert("error", `${of}: ${shortName(peer.peer)} gets no new connections`, peer.refused));
    if (peer.trouble) found.push(alert("warning", `${of}: lanes to ${shortName(peer.peer)} cannot be opened`, peer.trouble));
  }
  return found.concat(expiring(of, tunnel.certificates));
}
// A process loads the items of its identity at its start and at each SIGHUP.
function expiring(of, certificates) {
  return certificates.flatMap((one) => {
    const left = one.not_after_unix_s - Date.now() / 1000;
    const what = `${of}: ${one.item} in ${one.path}`;
    if (left < 0) return [alert("error", `${what} has expired`, "renew it and reload the process")];
    return left < 14 * DAY_S ? [alert("warning", `${what} expires in ${time(left)}`, "renew it and reload the process")] : [];
  });
}
function alertsOf(status) {
  const found = status.silent.map((one) =>
    alert("error", `A process (${one.kind}) does not answer`, `${one.text}: ${one.control}`));
  for (const session of status.sessions) {
    const vm = `VM ${session.vm}`;
    if (session.resolvable) found.push(alert("error", `${vm} is paused here: it may run at the destination`, "dunlin resolve settles it"));
    if (isStalled(session)) found.push(alert("warning", `${vm}: no progress for more than ${STALLED_S} s`, ""));
    const throttle = session.live && session.live.migration ? session.live.migration.throttle : 0;
    if (throttle >= 50) found.push(alert("warning", `${vm} is slowed down by ${throttle} %`, "it writes memory faster than the lanes carry it"));
  }
  for (const tunnel of status.tunnels) found.push(...alertsOfTunnel(tunnel));
  for (const session of status.ipsec) {
    if (!session.up) found.push(alert("error", `IPsec with ${session.peer} is not up`, "packets of the ports are blocked"));
  }
  for (const one of status.handoffs) found.push(...expiring(`Hand-off at ${one.address}`, one.certificates));
  for (const one of status.identities) {
    found.push(...expiring(one.kind === "vm" ? (one.name ? `VM ${one.name}` : "Process that waits for a VM") : `IPsec ${one.name}`, one.certificates));
  }
  for (const one of status.history) {
    const age = (status.taken_ms - one.ended_ms) / 1000;
    if (age > 3600 || one.result === "moved" || one.result === "cancelled") continue;
    found.push(alert(one.result === "in-doubt" ? "error" : "warning",
      `Migration of ${one.vm} ${one.role === "source" ? "to" : "from"} ${one.peer}: ${one.result} ${time(Math.max(0, age))} ago`, `${one.text} [${one.fault}]`));
  }
  return found.sort((a, b) => (a.level === b.level ? 0 : a.level === "error" ? -1 : 1));
}
function showAlerts(found, total) {
  const shown = found.slice(0, 20);
  if (found.length > shown.length) shown.push(alert("warning", `${found.length - shown.length} more`, ""));
  const calm = byId("calm");
  calm.hidden = found.length > 0;
  setText(calm, `Nothing. ${total}`);
  keyed(byId("alerts"), shown, (one) => one.text.replace(/[0-9.]+ m?(s|min|h)\b/, ""), () => make("li", {}, make("b"), make("span"), make("span")), (child, one) => {
    child.className = one.level;
    setText(child.children[0], one.level === "error" ? "Error" : "Warning");
    setText(child.children[1], one.text);
    setText(child.children[2], one.advice);
  });
  const errors = found.filter((one) => one.level === "error").length;
  return errors ? `(${errors}!) ` : found.length ? `(${found.length}) ` : "";
}

// ---- The loop --------------------------------------------------------------------------------

function show(status) {
  const { sessions, tunnels } = status;
  const routes = tunnels.flatMap((tunnel) => tunnel.routes);
  const sum = (items, value) => items.reduce((all, one) => all + value(one), 0);
  const away = sessions.filter((one) => one.role === "source").length;
  const found = alertsOf(status);
  const mark = showAlerts(found, `${count(sessions.length, "migration")} under way, ${count(tunnels.length, "tunnel")}.`);
  const host = status.host || location.host || "this host";
  setText(byId("host"), host);
  document.title = `${mark}${host} – Dunlin`;
  setText(byId("version"), `Version ${status.version}.`);
  const progress = sessions.map(progressOf).filter(Boolean);
  facts(byId("tiles"), [
    ["Leaving / arriving", `${away} / ${sessions.length - away}`],
    ["VMs send", rate(sum(progress, (one) => one.bytes_per_s))],
    ["Tunnels send", rate(sum(routes, (route) => route.read_bytes_per_s))],
    ["Tunnels receive", rate(sum(routes, (route) => route.written_bytes_per_s))],
    ["Open channels", String(sum(routes, (route) => route.channels))],
    ["Moved / all, lately", `${status.history.filter((one) => one.result === "moved").length} / ${status.history.length}`],
  ]);
  const urgent = (session) => (session.resolvable ? 2 : 0) + (isStalled(session) ? 1 : 0);
  const ordered = sessions.slice().sort((a, b) => urgent(b) - urgent(a) || a.vm.localeCompare(b.vm));
  byId("no-sessions").hidden = sessions.length > 0;
  keyed(byId("sessions"), ordered.slice(0, CARDS), keyOf, sessionCard, updateSession);
  byId("more-sessions").hidden = sessions.length <= CARDS;
  setText(byId("more-sessions"), `and ${sessions.length - CARDS} more`);
  byId("no-tunnels").hidden = tunnels.length > 0;
  keyed(byId("tunnels"), tunnels, (tunnel) => `${tunnel.name} ${tunnel.pid}`, tunnelCard, updateTunnel);
  byId("ipsec-section").hidden = status.ipsec.length === 0;
  keyed(byId("ipsec"), status.ipsec, (one) => `${one.peer} ${one.ports}`,
    () => make("article", { class: "card" }, make("div", { class: "top" }, make("h3"), make("span", { class: "soft" })), make("div")), updateIpsec);
  updateHandoffs(status.handoffs);
  updateHistory(status.history);
  forget(new Set(sessions.map(keyOf)));
}

let paused = false;
let good = null;

function showClock(trouble) {
  const clock = byId("clock");
  const since = good ? good.toLocaleTimeString() : "the start";
  clock.classList.toggle("old", trouble !== null);
  setText(clock, trouble !== null ? `No answer since ${since}: ${trouble}` : paused ? `Paused at ${since}` : since);
}
async function poll() {
  if (!paused && !document.hidden) {
    try {
      const answer = await fetch("/status.json", { cache: "no-store", signal: AbortSignal.timeout(8000) });
      if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
      const status = await answer.json();
      if (!paused) {
        show(status);
        good = new Date();
        showClock(null);
      }
    } catch (error) {
      showClock(error.message);
    }
  }
  setTimeout(poll, 1000);
}
byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  setText(byId("pause"), paused ? "Continue" : "Pause");
  showClock(null);
});
poll();
