"""The page as people see it, in a real browser: `pytest tests/ui -m browser`. Pictures: tests/ui/artefacts/."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from msgspec import structs

from omni_proxy.messages import WorkerAdded, WorkerDown
from omni_proxy.observe.expert_loads import ExpertReading
from tests.relay.conftest import Rig, Start
from tests.relay.scripted import Seen, decode_stream, prefill_answer
from tests.ui.browser import Page, chromium
from tests.ui.conftest import (
    ADMIN,
    TOKEN,
    admin,
    admin_url,
    artefacts,
    expert_counters,
    slow_decode,
    slow_prefill,
    traffic,
    vllm_metrics,
)

pytestmark = [pytest.mark.browser, pytest.mark.slow]

READY = "document.body.dataset.ready"


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with chromium() as driver:
        yield Page(driver)


@pytest.fixture
async def page(browser: Page) -> AsyncIterator[Page]:
    """The page; nothing of it is left for the next test."""
    await browser.leave()
    yield browser
    await browser.leave()


async def busy(start: Start) -> Rig:
    """Two P and three D that say how much they hold; two of them count experts."""
    scripts = {"p0": slow_prefill(1), "p1": slow_prefill(2)} | {f"d{i}": slow_decode(i) for i in range(3)}
    rig = await start(ADMIN | {"health": {"experts_interval_s": 0.5}}, **scripts)
    for number, (name, worker) in enumerate(rig.workers.items()):
        # They are asked once more what they hold when they come up again.
        worker.gets["/metrics"] = vllm_metrics(60_000 if name[0] == "p" else 5_000)
        if name in ("d0", "d1"):
            for path, body in expert_counters(26, 64, number).items():
                worker.gets[path] = worker.gets.get(path, b"") + body
        worker.healthy = False
    async with asyncio.timeout(10):
        while any(w.up for w in rig.gateway.scheduling.workers()):
            await asyncio.sleep(0.01)
    for worker in rig.workers.values():
        worker.healthy = True
    await rig.up()
    return rig


async def logged_in(page: Page, rig: Rig, width: int = 1280, dark: bool = False) -> None:
    await page.open(f"{admin_url(rig)}/omni/ui", width, dark)
    await page.js("sessionStorage.clear()")
    await page.open(f"{admin_url(rig)}/omni/ui", width, dark)
    await page.log_in(TOKEN)
    await page.until(READY)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
async def test_it_shows_a_busy_gateway(start: Start, page: Page, width: int, dark: bool) -> None:
    rig = await busy(start)
    async with traffic(rig, 0.12):
        await logged_in(page, rig, width, dark)
        await page.until("document.querySelectorAll('#rows .row').length >= 30", 60)
        await page.until("!document.querySelector('#heat').hidden")
        await asyncio.sleep(2.5)
        name = f"page-{width}-{'dark' if dark else 'light'}"
        await page.shoot(artefacts(), name)
        # Nothing sticks out to the side.
        assert await page.js("return document.documentElement.scrollWidth <= window.innerWidth")
        assert await page.js("return document.querySelectorAll('.pool').length") == 2
        assert await page.js("return document.querySelectorAll('.worker').length") == 5
        stages = await page.js(
            "return new Set([...document.querySelectorAll('.track rect')].map(r => r.className.baseVal)).size"
        )
        assert stages >= 6
        assert await page.js(
            "return [...document.querySelectorAll('.plot .line')].some(p => p.getAttribute('d').length > 30)"
        )
        await page.js("document.querySelector('#rows .row[data-outcome=completed]').click()")
        await page.until("document.querySelector('.placement')")
        await page.shoot(artefacts(), f"detail-{width}-{'dark' if dark else 'light'}")
    assert await page.complaints() == []


async def test_it_asks_for_the_token_again_when_it_was_refused(start: Start, page: Page) -> None:
    rig = await start(ADMIN)
    await page.open(f"{admin_url(rig)}/omni/ui")
    await page.log_in("not-the-token")
    await page.until("document.querySelector('#login-fault').textContent.includes('refused')")
    assert await page.js(f"return {READY}") is None
    await page.log_in(TOKEN)
    await page.until(READY)
    assert await page.js("return document.querySelector('#login').open") is False
    assert await page.js("return location.href.includes('token') || document.cookie !== ''") is False


async def test_a_worker_is_drained_and_brought_back_by_keyboard(start: Start, page: Page) -> None:
    rig = await start(ADMIN | {"connector": "aggregated"}, m0=decode_stream, m1=decode_stream)
    await logged_in(page, rig)
    await page.js("document.querySelector('.worker button').focus()")
    await page.keys(" ")
    await page.until("document.activeElement.textContent === 'Really drain?'")
    assert all(not w.draining for w in rig.gateway.scheduling.workers())
    await page.keys(" ")
    await page.until("document.activeElement.textContent === 'Undrain'")
    await page.until("document.querySelector('.state').dataset.state === 'draining'")
    assert [w.spec.name for w in rig.gateway.scheduling.workers() if w.draining] == ["m0"]
    assert await page.text("#said") == "m0 drains"
    await page.shoot(artefacts(), "draining-1280-light")
    await page.keys(" ")
    await page.until("document.querySelector('.state').dataset.state === 'up'")
    assert await page.complaints() == []


async def test_requests_are_walked_and_opened_by_keyboard(start: Start, page: Page) -> None:
    rig = await start(ADMIN)
    for number in range(3):
        await rig.client.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "x"}]},
            headers={"x-request-id": f"r{number}"},
        )
    await logged_in(page, rig)
    await page.until("document.querySelectorAll('#rows .row').length === 3")
    assert await page.js("return document.querySelectorAll('#rows [tabindex=\"0\"]').length") == 1
    await page.js("document.querySelector('#rows [tabindex=\"0\"]').focus()")
    await page.keys("\ue015", "\ue015")  # arrow down
    assert await page.js("return document.activeElement.querySelector('.rid').textContent") == "r0"
    await page.keys("\ue007")  # enter
    await page.until("document.querySelectorAll('.placement').length === 2")
    assert await page.text("#detail-title") == "r0"
    assert "its answer ends soonest" in await page.text("#detail-body")
    await page.keys("\ue00c")  # escape
    await page.until("!document.querySelector('#detail').open")
    assert await page.js("return document.activeElement.querySelector('.rid').textContent") == "r0"
    await page.keys("p")
    await page.until("document.querySelector('#pause').getAttribute('aria-pressed') === 'true'")
    unnamed = "[...document.querySelectorAll('button, select, input, [role=img]')].filter(e => e.checkVisibility() && "
    unnamed += "!(e.textContent.trim() || e.getAttribute('aria-label') || e.closest('label')))"
    assert await page.js(f"return {unnamed}.length") == 0


HOSTILE = "<img/src=x/onerror=window.hacked=1>"


async def test_what_comes_from_outside_is_text(start: Start, page: Page) -> None:
    rig = await start(ADMIN)
    rig["d0"].gets["/version"] = b'{"version":"<script>window.hacked=2</script>"}'
    await rig.client.post(
        "/v1/chat/completions",
        json={"model": HOSTILE, "messages": [{"role": "user", "content": HOSTILE}]},
        headers={"x-request-id": HOSTILE},
    )
    await rig.client.post(
        "/v1/chat/completions",
        json={"model": "m", "messages": [{"role": "user", "content": "x"}]},
        headers={"x-request-id": '"><svg/onload=window.hacked=3>'},
    )
    spec = next(w.spec for w in rig.gateway.scheduling.workers() if w.spec.name == "d0")
    evil = structs.replace(spec, name="<b onclick=window.hacked=4>d9</b>", engine=HOSTILE)
    rig.gateway.scheduling.post(WorkerAdded(evil))
    rig.gateway.scheduling.post(WorkerDown(evil.name, "<iframe src=//evil.example>"))
    rig.gateway.scheduling.expert_loads.read("<i>w</i>", ExpertReading(((3, 1), (2, 2))), 1.0)
    await logged_in(page, rig)
    await page.until("document.querySelectorAll('#rows .row').length >= 1")
    await page.until("[...document.querySelectorAll('.worker-name')].some(e => e.textContent.startsWith('<b '))")
    rows = await page.js("return document.querySelectorAll('#rows .row').length")
    for number in range(rows):
        await page.js("document.querySelectorAll('#rows .row')[arguments[0]].click()", number)
        await page.until("document.querySelector('.facts')")
        await page.js(
            "document.querySelector('#detail').close(); document.querySelector('#detail-body').replaceChildren()"
        )
    shown = await page.js("return document.body.innerText")
    assert HOSTILE in shown
    foreign = "main :is(img, script, iframe, b[onclick], i[onclick]), main svg[onload], dialog :is(img, script, iframe)"
    assert await page.js(f"return document.querySelectorAll({foreign!r}).length") == 0
    assert await page.js("return window.hacked === undefined")
    # And should a way in be found all the same, the policy of the page stops it.
    stopped = await page.js(
        "try { document.body.insertAdjacentHTML('beforeend', arguments[0]); return false } catch (e) { return true }",
        "<b>x</b>",
    )
    assert stopped is True


async def test_both_tracks_of_a_parallel_request_are_drawn(start: Start, page: Page) -> None:
    async def prefill(seen: Seen) -> None:
        await asyncio.sleep(0.3)
        await seen.answer(200, prefill_answer())

    async def decode(seen: Seen) -> None:
        await asyncio.sleep(0.35)
        await decode_stream(seen)

    each = {"p0": {"bootstrap_port": 8998}}
    rig = await start(
        {**ADMIN, "connector": "sglang", "each": each, "schedule_mode": "parallel"}, p0=prefill, d0=decode
    )
    await rig.chat(stream=True)
    await logged_in(page, rig)
    await page.until("document.querySelectorAll('#rows .row').length === 1")
    rects = "[...document.querySelectorAll('.track rect')]"
    spans = f"Object.fromEntries({rects}.map(r => [r.className.baseVal, r.x.baseVal.value]))"
    lengths = f"Object.fromEntries({rects}.map(r => [r.className.baseVal, r.width.baseVal.value]))"
    begins, lasts = await page.js(f"return {spans}"), await page.js(f"return {lengths}")
    assert begins["stage-8"] < begins["stage-5"] + lasts["stage-5"]  # D runs while P does
    assert lasts["stage-5"] > 0.2
    await page.shoot(artefacts(), "parallel-1280-light")


async def test_the_page_finds_its_gateway_again(start: Start, page: Page) -> None:
    rig = await start(ADMIN)
    await logged_in(page, rig)
    feed = rig.gateway.scheduling.page
    assert feed.listeners == 1
    await page.js(
        "document.querySelector('#link').seen = []; new MutationObserver(() => "
        "document.querySelector('#link').seen.push(document.querySelector('#link').dataset.state))"
        ".observe(document.querySelector('#link'), {attributes: true})"
    )
    feed.hang_up()
    await page.until("document.querySelector('#link').seen.join().includes('wait,live')")
    assert feed.listeners == 1
    async with admin(rig) as client:
        assert (await client.get("/omni/ui/state")).status_code == 200
