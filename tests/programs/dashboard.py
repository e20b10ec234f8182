"""The page of `farfield top --serve` in a real browser.

Usage: dashboard.py FARFIELD CHROMIUM FOLDER [SECONDS]

Starts two memory servers, a job over a mirror of both, and a dashboard; looks at the page as a
person does, kills and starts servers and the dashboard, and keeps pictures in FOLDER. With SECONDS,
five browsers look for so long instead, while jobs come and go and servers die and come back. Prints
what it measured, and `ok` at the end.

Danger: numbers that stand still, names that become markup, states that nobody is told of, a page
that cannot be used without a mouse, on a phone or in the dark, and requests to strangers; a page or
a dashboard that grows for as long as it is open.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

FARFIELD, CHROMIUM, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
PATIENCE_S = 60
HTML = "<img src=x onerror=alert(1)><script>alert(2)</script>"
# Walks through three times more memory than is near.
WALK = "import sys\nb = bytearray(96 << 20)\nwhile True:\n for i in range(0, len(b), 4096): b[i] = (b[i] + 1) & 255\n"


def free_port():
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


class Programs:
    """Programs of the test, all of which end with it."""

    def __init__(self, errors=subprocess.PIPE):
        self.running, self.errors = [], errors

    def start(self, *words):
        program = subprocess.Popen([FARFIELD, *map(str, words)], stdout=subprocess.PIPE, stderr=self.errors, text=True,
                                   start_new_session=True)
        self.running.append(program)
        return program

    def server(self, port):
        program = self.start("serve", "--listen", f"tcp://127.0.0.1:{port}", "--capacity", "512M", "--log-format", "json")
        assert program.stdout.readline().startswith("{"), program.stderr.read()
        return program

    def dashboard(self, port, *words):
        program = self.start("top", "--serve", f"127.0.0.1:{port}", *words)
        url = program.stdout.readline().strip()
        assert url.startswith("http://"), program.stderr.read()
        return program, url

    def kill(self, program):
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()

    def __exit__(self, *_):
        for program in self.running:
            if program.poll() is None:
                self.kill(program)

    def __enter__(self):
        return self


def until(what, condition):
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.1)
    return value


class Watch:
    """What the page says in the console, and whom it asks."""

    def __init__(self, page, url):
        self.complaints, self.strangers, self.url = [], [], url
        page.on("console", lambda it: self.complaints.append(f"{it.type}: {it.text}"))
        page.on("pageerror", lambda it: self.complaints.append(f"error: {it}"))
        page.on("request", lambda it: it.url.startswith(url) or self.strangers.append(it.url))

    def check(self, when):
        assert not self.complaints, f"{when}: {self.complaints}"
        assert not self.strangers, f"{when}: {self.strangers}"


def cell(page, id, label):
    return page.locator(f'#jobs tr[data-id="{id}"] td[data-label="{label}"]').inner_text()


def focus(page):
    return page.evaluate("document.activeElement.closest('tr')?.dataset.id ?? document.activeElement.id")


def check_keyboard(page, id):
    page.keyboard.press("/")
    assert focus(page) == "filter", focus(page)
    page.keyboard.type("no such job")
    until("the filter hides the job", lambda: page.locator(f'#jobs tr[data-id="{id}"]').count() == 0)
    page.keyboard.press("Escape")
    until("and shows it", lambda: page.locator(f'#jobs tr[data-id="{id}"]').count() == 1)
    tabs = 0
    while not page.evaluate("document.activeElement.closest('#jobs tbody') !== null"):
        page.keyboard.press("Tab")
        tabs += 1
        assert tabs < 60, "Tab does not come to the jobs"
        if page.evaluate("document.activeElement.closest('#jobs th')?.textContent") == "Far":
            page.keyboard.press("Enter")
    far = page.locator("#jobs th", has_text="Far").first
    assert far.get_attribute("aria-sort") == "descending", "Enter at a heading sorts"
    page.keyboard.press("End")
    page.keyboard.press("Home")
    assert focus(page) == page.locator("#jobs tbody tr").first.get_attribute("data-id")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "the focus can be seen"
    while focus(page) != id:
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("#details").evaluate("it => it.open"), "Enter opens the details"
    until("details are there", lambda: page.locator("#facts dt", has_text="near limit").count() > 0)
    until("with a history", lambda: page.locator("#details-hour path.first").first.get_attribute("d"))
    page.screenshot(path=FOLDER / "details.png")
    page.keyboard.press("Escape")
    until("Escape closes them", lambda: not page.locator("#details").evaluate("it => it.open"))
    until("the focus is back", lambda: focus(page) == id)


def luminance(page, what):
    red, green, blue = page.evaluate(f"getComputedStyle(document.body).{what}.match(/[0-9.]+/g).map(Number)")[:3]
    linear = [it / 255 / 12.92 if it <= 10 else ((it / 255 + 0.055) / 1.055) ** 2.4 for it in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def check_dark(page):
    for scheme, is_dark in (("dark", True), ("light", False)):
        page.emulate_media(color_scheme=scheme)
        back, text = luminance(page, "backgroundColor"), luminance(page, "color")
        assert (back < 0.1) == is_dark, (scheme, back)
        contrast = (max(back, text) + 0.05) / (min(back, text) + 0.05)
        assert contrast >= 7, (scheme, contrast)
        page.screenshot(path=FOLDER / f"{scheme}.png")


def check_narrow(page):
    page.set_viewport_size({"width": 340, "height": 740})
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 340, f"the page is {width} wide in a window of 340"
    page.screenshot(path=FOLDER / "narrow.png")
    page.set_viewport_size({"width": 1280, "height": 900})


def check_thousand(browser, url):
    """A page of 1,000 jobs, whose numbers come from here: how long until they are there, and to sort and filter them."""
    finding = {"check": "full", "level": "warn", "found": "it is full", "advice": "make room"}
    job = {"kind": "job", "machine": "m", "limit": 1 << 30, "offer": 0, "least": 0, "p50": 4000, "p99": 9000, "pages_in": 0,
           "pages_out": 0, "processes": 1, "pool": "tcp://127.0.0.1:7400", "is_here": True}
    jobs = {f"0-j-{n}": {**job, "pid": n, "name": f"./train --shard {n}", "near": n << 20, "far": n << 21, "faults": n,
                         "state": "full" if n % 100 == 0 else "ok", "findings": [finding] if n % 100 == 0 else []}
            for n in range(1, 1001)}
    event = f"event: snapshot\nid: 1\ndata: {json.dumps({'at': 1, 'rows': jobs, 'gone': []})}\n\nretry: 100000\n\n"
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.route("**/events", lambda route: route.fulfill(body=event, content_type="text/event-stream"))
    start = time.monotonic()
    page.goto(url)
    until("all jobs are there", lambda: page.locator("#jobs-count").inner_text() == "1000")
    shown_s = time.monotonic() - start
    sort_ms = page.evaluate("""() => { const start = performance.now();
        [...document.querySelectorAll('#jobs th button')].find((it) => it.textContent === 'Far').click();
        document.body.getBoundingClientRect(); return performance.now() - start; }""")
    assert page.locator("#jobs tbody tr").first.get_attribute("data-id") == "0-j-1000"
    page.fill("#filter", "full")
    assert page.locator("#jobs tbody tr").count() == 10
    page.fill("#filter", "")
    page.locator("#jobs tbody button").first.focus()
    page.keyboard.press("End")
    page.keyboard.press("End")
    assert page.locator("#jobs tbody tr").count() == 400, "the end of the lines brings more"
    page.locator("#jobs ~ .more").click()
    assert page.locator("#jobs tbody tr").count() == 1000
    assert page.locator("#jobs tbody button[tabindex='0']").count() == 1, "one stop for Tab"
    page.screenshot(path=FOLDER / "thousand.png")
    page.close()
    print(f"1,000 jobs: shown after {shown_s:.2f} s, sorted in {sort_ms:.0f} ms")


def check_page(programs, browser):
    ports = [free_port(), free_port()]
    servers = [programs.server(port) for port in ports]
    walk = FOLDER / "walk.py"
    walk.write_text(WALK)
    pool = "mirror({})".format(",".join(f"tcp://127.0.0.1:{port}" for port in ports))
    job = programs.start("run", "--quiet", "--near", "32M", "--far", pool, "--", sys.executable, walk, HTML)
    id = f"0-j-{job.pid}"
    port = free_port()
    dashboard, url = programs.dashboard(port)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    watch = Watch(page, url)
    start = time.monotonic()
    page.goto(url)
    line = f'#jobs tr[data-id="{id}"]'
    page.wait_for_selector(line, timeout=PATIENCE_S * 1000)
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN")
    print(f"first paint after {paint:.0f} ms, first job after {time.monotonic() - start:.2f} s")

    until("faults are counted", lambda: cell(page, id, "Faults/s") not in ("", "0"))
    for label in ("Faults/s", "p99"):
        before = cell(page, id, label)
        until(f"{label} changes", lambda: cell(page, id, label) != before)
    assert HTML in page.locator(f"{line} .name").inner_text(), "a name is shown as it is"
    assert page.locator("img").count() == 0 and page.locator("script").count() == 1, "and is no markup"
    until("both servers are there", lambda: page.locator("#servers tbody tr").count() >= 2)
    until("a plot", lambda: (page.locator("#hour path.first").first.get_attribute("d") or "").count("L") > 0)
    watch.check("at first")

    check_keyboard(page, id)
    check_dark(page)
    check_narrow(page)
    watch.check("after keyboard, dark and narrow")

    programs.kill(servers[1])
    until("the loss is told", lambda: cell(page, id, "State") in ("unprotected", "degraded"))
    until("with what to do", lambda: "start" in page.locator("#advice").inner_text())
    until("the server is lost", lambda: page.locator("#servers .is-fail").count() == 1)
    page.screenshot(path=FOLDER / "lost.png")
    programs.server(ports[1])
    until("the server is back", lambda: page.locator("#servers .is-fail").count() == 0)
    until("all is well again", lambda: cell(page, id, "State") in ("ok", "waiting"))
    watch.check("after a server has died and come back")

    programs.kill(dashboard)
    until("the page says that it is alone", lambda: "no connection" in page.locator("#link").inner_text())
    programs.dashboard(port)
    until("it goes on by itself", lambda: page.locator("#link").inner_text() == "live" and cell(page, id, "Near"))
    assert not watch.strangers, watch.strangers

    programs.kill(job)
    until("the end of the job is shown", lambda: cell(page, id, "State") == "ended")
    check_thousand(browser, url)


class Sizes:
    """What a dashboard and the pages have in memory, and how many lines the pages show."""

    def __init__(self, dashboard, pages):
        self.dashboard, self.pages = dashboard, pages
        self.sessions = [page.context.new_cdp_session(page) for page in pages]

    def now(self):
        with open(f"/proc/{self.dashboard.pid}/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        heaps = []
        for session in self.sessions:
            session.send("HeapProfiler.collectGarbage")
            heaps.append(session.send("Runtime.getHeapUsage")["usedSize"])
        lines = max(page.locator("#jobs tbody tr").count() for page in self.pages)
        descriptors = len(os.listdir(f"/proc/{self.dashboard.pid}/fd"))
        return {"resident": resident, "heap": max(heaps), "lines": lines, "descriptors": descriptors}


def soak(programs, browsers, seconds):
    ports = [free_port(), free_port()]
    servers = {port: programs.server(port) for port in ports}
    walk = FOLDER / "walk.py"
    walk.write_text(WALK)
    pool = "mirror({})".format(",".join(f"tcp://127.0.0.1:{port}" for port in ports))
    dashboard, url = programs.dashboard(free_port())
    pages = [browser.new_page(viewport={"width": 1280, "height": 900}) for browser in browsers]
    watches = [Watch(page, url) for page in pages]
    for page in pages:
        page.goto(url)
    sizes, first, jobs, kills = Sizes(dashboard, pages), None, [], 0
    start = time.monotonic()
    while (passed := time.monotonic() - start) < seconds:
        jobs.append(programs.start("run", "--quiet", "--near", "32M", "--far", pool, "--", sys.executable, walk, HTML))
        if len(jobs) > 3:
            programs.kill(jobs.pop(0))
        ids = [f"0-j-{job.pid}" for job in jobs]
        for page in pages:
            until("each page shows the new job", lambda: page.locator(f'#jobs tr[data-id="{ids[-1]}"]').count() == 1)
            until("and that it pages", lambda: cell(page, ids[-1], "Faults/s") not in ("", "0"))
        port = ports[kills % 2]
        programs.kill(servers[port])
        kills += 1
        for page in pages:
            until("each page tells the loss", lambda: cell(page, ids[-1], "State") in ("unprotected", "degraded"))
        servers[port] = programs.server(port)
        for page in pages:
            for id in ids:
                until("all is well again", lambda: cell(page, id, "State") in ("ok", "waiting"))
        # People leave and come back, and filter.
        page = pages[kills % len(pages)]
        page.fill("#filter", "no such job")
        page.fill("#filter", "")
        if kills % 3 == 0:
            page.reload()
        for watch in watches:
            watch.check(f"after {passed:.0f} s")
        now = sizes.now()
        assert now["lines"] < 64 and now["descriptors"] < 128, now
        if first is None and passed > seconds / 4:
            first = now
    assert dashboard.poll() is None, "the dashboard lives"
    last = sizes.now()
    print(f"{kills} servers killed; after a quarter {first}, at the end {last}")
    # The dashboard keeps an hour of history, 18 MiB at most.
    assert last["resident"] < first["resident"] + (40 << 20) and last["heap"] < 2 * first["heap"] + (8 << 20), (first, last)


def launch(playwright):
    return playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


if len(sys.argv) > 4:
    with Programs(subprocess.DEVNULL) as programs, sync_playwright() as playwright:
        browsers = [launch(playwright) for _ in range(5)]
        soak(programs, browsers, float(sys.argv[4]))
        for browser in browsers:
            browser.close()
else:
    with Programs() as programs, sync_playwright() as playwright:
        browser = launch(playwright)
        check_page(programs, browser)
        browser.close()
print("ok")
