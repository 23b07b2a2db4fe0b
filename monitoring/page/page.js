// Draws state.json once a second. Everything is built from elements and text nodes: nothing of the daemon becomes markup.
'use strict';

const POLL_MS = 1000;
const HIT_WINDOW = 60, HIT_CURVE = 10;  // samples that the hit ratio is over: the number's, each point's of the curve
const svgNs = 'http://www.w3.org/2000/svg';
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const node = tag === 'svg' || attributes.svg ? document.createElementNS(svgNs, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'svg') continue;
    if (name === 'style') Object.assign(node.style, value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
const shape = (tag, attributes, ...children) => element(tag, {svg: true, ...attributes}, ...children);

// ---- numbers for people ----

function scaled(value, units, base) {
  if (value === null || value === undefined) return '–';
  let unit = 0;
  while (unit + 1 < units.length && Math.abs(value) >= base * 0.9995) { value /= base; unit++; }
  const digits = unit === 0 && Number.isInteger(value) ? 0 : Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toFixed(digits) + units[unit];
}
const bytes = (value) => scaled(value, [' B', ' KiB', ' MiB', ' GiB', ' TiB'], 1024);
const count = (value) => scaled(value, ['', ' k', ' M', ' G'], 1000);
const perSecond = (value) => value === null ? '–' : count(Math.round(value * 10) / 10) + '/s';
const share = (value) => value === null || Number.isNaN(value) ? '–' : (100 * value).toFixed(value < 0.1 && value > 0 ? 1 : 0) + '%';
function time(seconds) {
  if (seconds === null || seconds === undefined) return '–';
  if (seconds === 0) return '0 s';
  if (seconds < 1e-3) return scaled(seconds * 1e6, [' µs'], 1000);
  if (seconds < 1) return scaled(seconds * 1e3, [' ms'], 1000);
  return scaled(seconds, [' s'], 1e9);
}
function age(seconds) {
  if (seconds < 60) return Math.round(seconds) + ' s';
  if (seconds < 3600) return Math.round(seconds / 60) + ' min';
  if (seconds < 86400) return (seconds / 3600).toFixed(1) + ' h';
  return (seconds / 86400).toFixed(1) + ' d';
}

// ---- charts ----

function roundUp(value, binary) {
  if (binary) return 2 ** Math.ceil(Math.log2(value * 0.999));
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((edge) => edge >= value * 0.999);
}

// Lines over time, the newest at the right edge. series: [{name, color, values, area}]; null is a gap.
function lineChart(figure, series, format, options = {}) {
  const width = Math.max(240, figure.clientWidth), height = 132, left = 62, top = 8, bottom = 20;
  const samples = options.times.length;
  const seen = series.flatMap((line) => line.values.filter((value) => value !== null));
  const peak = Math.max(...seen, 0);
  const max = options.max || (peak > 0 ? roundUp(peak, options.binary) : options.floor || 1);
  const x = (i) => width - (samples - 1 - i) * (width - left) / (options.span - 1);
  const y = (value) => height - bottom - Math.min(1, value / max) * (height - top - bottom);
  const svg = element('svg', {viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': options.label});
  for (const part of [0, 0.5, 1]) {
    svg.append(
        shape('line', {class: 'grid', x1: left, x2: width, y1: y(part * max), y2: y(part * max)}),
        shape('text', {x: left - 8, y: y(part * max) + 4, 'text-anchor': 'end'}, format(part * max)));
  }
  svg.append(
      shape('text', {x: left, y: height - 4}, `${Math.round(options.span / 60)} min ago`),
      shape('text', {x: width, y: height - 4, 'text-anchor': 'end'}, 'now'));
  for (const line of series) {
    let path = '', start = null;
    const close = (end) => line.area && start !== null
        ? svg.append(shape('path', {d: `${path}L${x(end)},${y(0)}L${x(start)},${y(0)}Z`, fill: line.color, opacity: 0.18})) : 0;
    const stroke = () => path && svg.append(shape('path', {d: path, fill: 'none', stroke: line.color, 'stroke-width': 1.6,
                                                           'stroke-linejoin': 'round', 'stroke-linecap': 'round'}));
    line.values.forEach((value, i) => {
      if (value === null) {
        if (start !== null) { stroke(); close(i - 1); }
        path = ''; start = null;
        return;
      }
      // A lone value is a dot: a line of no length with round ends.
      path += start === null ? `M${x(i)},${y(value)}h0` : `L${x(i)},${y(value)}`;
      if (start === null) start = i;
    });
    stroke(); close(samples - 1);
  }
  const legend = element('div', {class: 'legend'}, ...series.map((line) => {
    const values = line.values.filter((value) => value !== null);
    const last = line.values[line.values.length - 1];
    return element('span', {}, element('i', {style: {background: line.color}}),
                   `${line.name} ${last === null ? '–' : format(last)}`
                   + (values.length && options.peak ? ` (peak ${format(Math.max(...values))})` : ''));
  }));
  figure.replaceChildren(svg, legend);
}

function bars(box, rows, empty) {
  if (rows.length === 0) return box.replaceChildren(element('p', {class: 'empty'}, ...empty));
  box.replaceChildren(...rows.map((row) => element('div', {class: 'bar'},
      element('div', {class: 'row'}, element('span', {}, row.name), element('span', {}, row.text)),
      element('div', {class: 'track'}, element('div', {class: 'fill', style: {
        width: `${Math.max(0.5, 100 * Math.min(1, row.share))}%`, background: row.color || 'var(--blue)'}})))));
}

function table(box, className, heads, rows) {
  box.replaceChildren(element('table', {class: className},
      element('thead', {}, element('tr', {}, ...heads.map((head) => element('th', {class: head.class || ''}, head.name)))),
      element('tbody', {}, ...rows.map((row) => element('tr', {}, ...row.map(
          (cell, i) => element('td', {class: heads[i].class || ''}, cell)))))));
}

// ---- the page ----

const sum = (values) => values.reduce((all, value) => all + (value || 0), 0);

function draw(state) {
  const {daemon, now, history, errors} = state;
  const times = history.unix_ms, host = now.tiers[0];
  const span = 60 * Math.ceil(Math.max(times.length, 1) / 60);  // samples: whole minutes, of a young daemon fewer than five
  const chart = (id, series, format, options) => lineChart(byId(id), series, format, {times, span, label: id, ...options});

  byId('about').textContent = `${daemon.version}, up ${age(daemon.uptime_s)}, ${daemon.cpu_target}, ${daemon.threads} threads; `
      + [daemon.listen, daemon.peer_listen && `peers ${daemon.peer_listen}`, daemon.metrics_listen && `metrics ${daemon.metrics_listen}`]
          .filter(Boolean).join(', ');
  const badge = byId('state');
  badge.textContent = now.draining ? 'draining' : 'serving';
  badge.className = now.draining ? 'badge warn' : 'badge good';

  const asked = sum(history.asked_blocks.slice(-HIT_WINDOW)), hit = sum(history.hit_blocks.slice(-HIT_WINDOW));
  const tiles = [
    ['host pool in use', share(host.used / host.capacity)],
    ['hit ratio, last minute', asked > 0 ? share(hit / asked) : '–'],
    ['sequences', count(now.sequences)],
    ['tokens appended', perSecond(now.appended_tokens_per_s)],
    ['calls', perSecond(history.calls_per_s[times.length - 1])],
    ['errors, last minute', count(Math.round(sum(history.errors_per_s.slice(-60))))],
  ];
  byId('tiles').replaceChildren(...tiles.map(([name, value]) => element('div', {class: 'tile'},
      element('b', {}, value), element('span', {}, name))));

  byId('memory-note').textContent = `${bytes(host.used)} of ${bytes(host.capacity)}, ${bytes(now.evictable)} of it evictable;`
      + ` ${count(now.published_blocks)} published blocks` + (now.refused_full > 0 ? `; ${count(now.refused_full)} requests refused because it was full` : '');
  chart('memory-chart', [
    {name: 'used', color: 'var(--blue)', values: history.used, area: true},
    {name: 'evictable', color: 'var(--green)', values: history.evictable},
  ], bytes, {max: host.capacity});

  bars(byId('tiers'), now.tiers.map((tier) => ({
    name: tier.name, text: `${bytes(tier.used)} of ${bytes(tier.capacity)}`, share: tier.capacity > 0 ? tier.used / tier.capacity : 0,
    color: tier.used > 0.9 * tier.capacity ? 'var(--orange)' : 'var(--blue)',
  })), ['no pools']);
  const largest = (rows) => Math.max(1, ...rows.map((row) => row.bytes));
  bars(byId('codecs'), now.forms.map((form) => ({
    name: `${form.codec} ${form.form}`, text: `${form.tier}, ${bytes(form.bytes)}`, share: form.bytes / largest(now.forms),
    color: form.form === 'raw' ? 'var(--orange)' : 'var(--blue)',
  })), ['no pages: no engine has appended tokens yet']);
  bars(byId('tenants'), now.tenants.map((tenant) => ({
    name: tenant.name, text: `${bytes(tenant.bytes)}, ${count(tenant.sequences)} sequences, ${count(tenant.published_blocks)} blocks`,
    share: tenant.bytes / largest(now.tenants), color: 'var(--purple)',
  })), ['no tenants: no engine has opened a cache yet']);

  const near = (values, i) => sum(values.slice(Math.max(0, i - HIT_CURVE + 1), i + 1));
  chart('hits-chart', [{name: `hit ratio, of ${HIT_CURVE} s`, color: 'var(--green)', area: true,
    values: times.map((_, i) => near(history.asked_blocks, i) > 0 ? near(history.hit_blocks, i) / near(history.asked_blocks, i) : null)}],
    share, {max: 1});
  const hitTiers = [['host', history.hit_host_blocks], ['GPU', history.hit_device_blocks], ['disk', history.hit_disk_blocks]]
      .map(([name, values]) => [name, sum(values.slice(-HIT_WINDOW))]).filter(([, blocks]) => blocks > 0)
      .map(([name, blocks]) => `${name} ${count(blocks)}`).join(', ');
  byId('hits-note').textContent = `last minute: ${count(hit)} of ${count(asked)} blocks${hitTiers && ` (${hitTiers})`}; evicted ${perSecond(history.evicted_per_s[times.length - 1])}`;

  byId('disk-panel').hidden = !now.disk;
  if (now.disk) {
    const {disk} = now;
    bars(byId('disk'), [{name: `${count(disk.blocks)} blocks`, text: `${bytes(disk.used)} of ${bytes(disk.capacity)}`,
                         share: disk.used / disk.capacity}]);
    chart('disk-chart', [
      {name: 'written', color: 'var(--blue)', values: history.disk_written, area: true},
      {name: 'read', color: 'var(--orange)', values: history.disk_read},
    ], (value) => bytes(value) + '/s', {floor: 1048576, peak: true, binary: true});
    byId('disk-note').textContent = `${count(disk.unwritten_blocks)} blocks are not written yet; ${count(disk.errors)} errors; `
        + `a write takes ${time(disk.write.p50_s)}, p99 ${time(disk.write.p99_s)}, a read ${time(disk.read.p50_s)}, p99 ${time(disk.read.p99_s)}`
        + (disk.unwritten_evictions > 0 ? `; ${count(disk.unwritten_evictions)} blocks were evicted before they were written` : '')
        + (disk.set_aside > 0 ? '; what was there at the start could not be used, and was set aside' : '');
  }
  byId('kept-panel').hidden = !now.kept;
  if (now.kept) {
    const {kept} = now, of = (part, whole) => whole > 0 ? part / whole : 0;
    bars(byId('kept'), [
      {name: 'a restart would find', text: `${count(kept.recorded_blocks)} of ${count(now.published_blocks)} published blocks`,
       share: of(kept.recorded_blocks, now.published_blocks), color: 'var(--green)'},
      {name: 'unclaimed', text: `${count(kept.unclaimed_blocks)} of ${count(kept.recovered_blocks)} found at the start`,
       share: of(kept.unclaimed_blocks, kept.recovered_blocks), color: 'var(--orange)'},
    ]);
    byId('kept-note').textContent = [
      [kept.unclaimed_lost_blocks, 'unclaimed blocks were given up'], [kept.unrecovered_blocks, 'recorded blocks could not be used'],
      [kept.unrecorded_blocks, 'blocks had no room to be recorded'],
    ].filter(([blocks]) => blocks > 0).map(([blocks, what]) => `${count(blocks)} ${what}`).join('; ');
  }

  chart('transfer-chart', [
    {name: 'sent', color: 'var(--blue)', values: history.sent, area: true},
    {name: 'received', color: 'var(--orange)', values: history.received},
  ], (value) => bytes(value) + '/s', {floor: 1048576, peak: true, binary: true});
  byId('transfer-note').textContent = `${count(now.transfers_ok)} hand-offs arrived, ${count(now.transfers_failed)} did not, `
      + `${count(now.active_transfers)} under way, ${count(now.tickets)} wait for their engine`;

  chart('attention-chart', [
    {name: 'on workers, p50', color: 'var(--blue)', values: history.workers_p50},
    {name: 'p99', color: 'var(--purple)', values: history.workers_p99},
    {name: 'on the loop, p50', color: 'var(--green)', values: history.loop_p50},
    {name: 'p99', color: 'var(--orange)', values: history.loop_p99},
  ], time, {floor: 1e-3});
  byId('attention-note').textContent = `${perSecond(history.attend_per_s[times.length - 1])} calls, ${perSecond(now.attended_tokens_per_s)} query tokens and layers`;

  chart('encoding-chart', [{name: 'pages waiting', color: 'var(--orange)', values: history.waiting_pages, area: true}],
        count, {floor: 10, peak: true});
  byId('encoding-note').textContent = `${perSecond(now.encode.per_s)} pages encoded, p50 ${time(now.encode.p50_s)}, p99 ${time(now.encode.p99_s)}`;

  const worst = Math.max(0.01, ...now.quality.map((codec) => codec.p99));
  bars(byId('quality'), now.quality.map((codec) => ({
    name: codec.codec, text: `median ${share(codec.p50)}, p99 ${share(codec.p99)} of ${count(codec.pages)} pages`,
    share: codec.p99 / worst, color: 'var(--green)',
  })), ['No page was sampled yet. The daemon compares one encoded page in N with its raw form where it is started with ',
        element('code', {}, '--quality-sample N'), ' (64 unless it says otherwise; 0: none).']);

  chart('calls-chart', [
    {name: 'calls', color: 'var(--blue)', values: history.calls_per_s, area: true},
    {name: 'errors', color: 'var(--red)', values: history.errors_per_s},
  ], perSecond, {floor: 10});

  if (errors.length === 0) byId('errors').replaceChildren(element('p', {class: 'empty'}, 'No call was answered with an error since the start.'));
  else {
    table(byId('errors'), 'errors', [{name: 'last', class: 'number'}, {name: 'count', class: 'number'}, {name: 'code'}, {name: 'call'},
                                     {name: 'message', class: 'message'}],
          errors.map((error) => [`${age(error.age_s)} ago`, `${count(error.count)}×`, error.code, error.method, error.message]));
  }
}

// ---- polling ----

let last = null;
async function poll() {
  try {
    const answer = await fetch('state.json', {cache: 'no-store', signal: AbortSignal.timeout(5000)});
    if (!answer.ok) throw new Error(`state.json: ${answer.status}`);
    const state = await answer.json();
    if (state.now) {
      last = state;
      draw(state);
      document.documentElement.dataset.polls = 1 + Number(document.documentElement.dataset.polls || 0);
    }
  } catch (error) {
    byId('state').textContent = 'no answer from the daemon';
    byId('state').className = 'badge bad';
    byId('state').title = String(error);
  }
  setTimeout(poll, POLL_MS);
}
addEventListener('resize', () => last && draw(last));
poll();
