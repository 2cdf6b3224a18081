"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const reading = document.querySelector(".reading"), when = reading.querySelector(".when"), inLoop = reading.querySelector(".loop-name");
  const cells = [...document.querySelectorAll("td.now")], columns = [...document.querySelectorAll(".now")];
  const unread = when.textContent;
  const ways = [...document.querySelectorAll("[data-way]")], peaks = ways.map((cell) => cell.textContent);
  const charts = [...document.querySelectorAll(".beside, .stacked")];
  const widest = (chart) => (chart.classList.contains("beside") ? data.widest : data.end);

  const inBytes = (size) => {
    for (const [unit, bytes] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (size >= bytes) return (size / bytes).toFixed(1) + " " + unit;
    }
    return size + " bytes";
  };
  const inSeconds = (time) => {
    if (time < 0.001) return (1e6 * time).toFixed(0) + " us";
    if (time < 1) return (1000 * time).toFixed(1) + " ms";
    return time < 180 ? time.toFixed(2) + " s" : (time / 60).toFixed(1) + " min";
  };
  const last = (moments, time) => {
    let low = 0, high = moments.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (moments[middle] <= time) low = middle + 1; else high = middle;
    }
    return Math.max(0, low - 1);
  };

  // teeth are narrower than a dot: of all moments under the pointer the highest is read
  const highest = (moments, totals, time, reach) => {
    let found = last(moments, time - reach);
    for (let i = found + 1; i < moments.length && moments[i] <= time + reach; i++) if (totals[i] > totals[found]) found = i;
    return found;
  };

  let shown = 0;
  const show = (time, reach) => {
    shown = Math.min(Math.max(time, 0), data.widest);
    const at = highest(data.seconds, data.ways[0][2], shown, reach), over = shown > data.end;
    let sum = 0;
    data.terms.forEach(([, sizes], i) => {
      const size = over ? 0 : sizes[at];
      sum += size;
      cells[i].textContent = inBytes(size);
    });
    cells[data.terms.length].textContent = inBytes(sum);
    ways.forEach((cell, i) => {
      const [, moments, totals, end] = data.ways[i];
      cell.textContent = shown > end ? "done" : inBytes(totals[highest(moments, totals, shown, reach)]) + " here";
    });
    const loop = data.loops.find(([, begins, ends]) => begins <= shown && shown < ends);
    const drawn = loop && loop[4] < loop[3] ? ", " + loop[4] + " drawn" : "";
    when.textContent = inSeconds(shown) + (over ? ", done" : shown < data.turn ? ", forward pass" : ", backward pass");
    inLoop.textContent = over ? "" : loop ? loop[0] + " (" + loop[3].toLocaleString("en") + " chunks" + drawn + ")" : "between loops";
    columns.forEach((cell) => { cell.hidden = false; });
    charts.forEach((chart) => {
      const line = chart.querySelector(".cursor");
      line.style.left = 100 * Math.min(1, shown / widest(chart)) + "%";
      line.hidden = false;
    });
  };
  const hide = () => {
    when.textContent = unread;
    inLoop.textContent = "";
    columns.forEach((cell) => { cell.hidden = true; });
    charts.forEach((chart) => { chart.querySelector(".cursor").hidden = true; });
    ways.forEach((cell, i) => { cell.textContent = peaks[i]; });
  };
  charts.forEach((chart) => {
    chart.addEventListener("pointermove", (event) => {
      const box = chart.querySelector(".plot").getBoundingClientRect(), reach = widest(chart) / box.width;
      show(reach * (event.clientX - box.left), reach);
    });
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) {
        const reach = widest(chart) / 400;
        show(shown + 2 * step * reach, reach);
        event.preventDefault();
      }
    });
  });
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((item) => { item.open = true; }));
})();
