// The stream of snapshots. `fetch` instead of EventSource, because only it can show a token.

const KEY = "omni-proxy-token";

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export function ask(path, options = {}) {
  const shown = token.get();
  const headers = { ...options.headers, ...(shown ? { authorization: `Bearer ${shown}` } : {}) };
  return fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
}

/** Calls `heard(snapshot)` for each, `state(name)` for "live", "wait" and "locked"; quiet while the page is hidden. */
export class Feed {
  #heard;
  #state;
  #abort = null;
  #timer = 0;
  #pause = 500;

  constructor(heard, state) {
    this.#heard = heard;
    this.#state = state;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#stop() : this.start()));
  }

  start() {
    this.#stop();
    this.#abort = new AbortController();
    this.#run(this.#abort.signal);
  }

  #stop() {
    clearTimeout(this.#timer);
    this.#abort?.abort();
  }

  async #run(signal) {
    try {
      const answer = await ask("/omni/ui/events", { signal });
      if (answer.status === 401) return this.#state("locked");
      if (!answer.ok || !answer.body) throw new Error(`status ${answer.status}`);
      this.#pause = 500;
      this.#state("live");
      await this.#read(answer.body);
    } catch (fault) {
      if (signal.aborted) return;
      console.info("the stream of events broke:", fault.message);
    }
    if (signal.aborted) return;
    this.#state("wait");
    this.#timer = setTimeout(() => this.start(), this.#pause);
    this.#pause = Math.min(this.#pause * 2, 8000);
  }

  async #read(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) if (event.startsWith("data: ")) this.#heard(JSON.parse(event.slice(6)));
    }
  }
}
