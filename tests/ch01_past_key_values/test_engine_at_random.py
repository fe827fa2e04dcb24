"""Random arrivals, options, aborts and memory: every request ends once and equals its solo run."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support import LimitedCache, check_books, make_engine, run_to_end, text_of, tokens_of

from minivllm.sampling_params import SamplingParams

PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 7),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    seed=st.integers(0, 3),
    top_k=st.sampled_from([0, 5]),
    stop=st.sampled_from([(), ("a",), ("e", "th")]),
)
PROMPT = st.lists(st.integers(0, 255), min_size=1, max_size=12)


def machine(tiny, solo_run):
    class EngineAtRandom(RuleBasedStateMachine):
        @initialize(
            slots=st.integers(18, 60), budget=st.integers(1, 40), max_running=st.integers(1, 6)
        )
        def start(self, slots, budget, max_running):
            self.engine = make_engine(
                *tiny, kv_cache=LimitedCache(slots), budget=budget, max_running=max_running
            )
            self.requests, self.increments, self.aborted = {}, {}, set()

        @rule(prompt=PROMPT, params=PARAMS)
        def add(self, prompt, params):
            request_id = self.engine.add_request(prompt, params)
            self.requests[request_id] = (prompt, params)
            self.increments[request_id] = []

        @rule(count=st.integers(1, 4))
        def step(self, count):
            for _ in range(count):
                for increment in self.engine.step():
                    self.increments[increment.request_id].append(increment)

        @rule(data=st.data())
        def abort(self, data):
            live = [r for r in self.requests if self.engine.is_live(r)]
            if live:
                request_id = data.draw(st.sampled_from(live))
                self.engine.abort(request_id)
                self.aborted.add(request_id)

        @invariant()
        def books_balance(self):
            if hasattr(self, "engine"):
                check_books(self.engine)

        def teardown(self):
            if not hasattr(self, "engine"):
                return
            for request_id, rest in run_to_end(self.engine, max_steps=2000).items():
                self.increments[request_id] += rest
            assert not self.engine.runner.caches
            assert self.engine.scheduler.kv_cache.num_free == (
                self.engine.scheduler.kv_cache.num_slots
            )
            for request_id, (prompt, params) in self.requests.items():
                increments = self.increments[request_id]
                reasons = [i.stop_reason for i in increments if i.stop_reason]
                tokens, text, reason = solo_run(prompt, params)
                if request_id in self.aborted:
                    assert reasons == []
                    assert tokens[: len(increments)] == tokens_of(increments)
                    assert text.startswith(text_of(increments))
                else:
                    assert (tokens_of(increments), text_of(increments)) == (tokens, text)
                    assert reasons == [reason]
                    assert increments[-1].stop_reason == reason

    return EngineAtRandom


@pytest.mark.parametrize("examples", [30, pytest.param(400, marks=pytest.mark.full)])
def test_engine_at_random(tiny, solo_run, examples):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine(tiny, solo_run),
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
