"""A Hypothesis state machine: the invariants hold for any events in any order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dutyfree.engine.pool.scheduler.decide import decide
from dutyfree.engine.pool.scheduler.state import State
from dutyfree.engine.pool.scheduler.values import Budget, Deliver, Policy
from tests.engine.pool.scheduler.simulation import Simulation, chain

CHAINS = [chain(name) for name in ("a", "a/b", "a/b/c", "a/b/d", "a/e", "f/g/h", "f/g/i")]
BUDGET = Budget(sandboxes=6, memory=6_000, sandbox_memory=900, disk=6_000, layer_disk=1_000)

chains = st.sampled_from(CHAINS)


class Rules(RuleBasedStateMachine):
    policy = Policy(backoff=2.0, idle_seconds=40.0, hint_seconds=30.0, starting=2, recipes=5)

    def __init__(self) -> None:
        super().__init__()
        self.world = Simulation(BUDGET, self.policy)

    @rule(wanted=chains, number=st.integers(1, 4), patience=st.sampled_from([1.0, 20.0, 500.0]))
    def request(self, wanted, number, patience):
        self.world.request(wanted, number=number, patience=patience)

    @rule(data=st.data(), number=st.sampled_from([1, 1, 2, 4]))
    def request_what_is_ready_now(self, data, number):
        idle = {wanted.key: self.world.idle(wanted) for wanted in CHAINS}
        wanted = data.draw(st.sampled_from([one for one in CHAINS if idle[one.key]] or CHAINS))
        there = idle[wanted.key] >= number and not self.world.state.queue
        answer = self.world.answers[self.world.request(wanted, number=number, patience=0.0)]
        assert isinstance(answer, Deliver) == there
        assert not there or {member.kind for member in answer.members} == {"warm"}

    @rule(wanted=chains, lease=st.sampled_from([2.0, 30.0]))
    def request_for_a_while(self, wanted, lease):
        self.world.request(wanted, lease=lease)

    @rule(number=st.integers(8, 9), wanted=chains)
    def request_more_than_there_can_be(self, number, wanted):
        request = self.world.request(wanted, number=number)
        assert request in self.world.answers

    @precondition(lambda self: self.world.startable())
    @rule(data=st.data(), memory=st.sampled_from([None, 500, 1_500]))
    def finish(self, data, memory):
        self.world.finish(data.draw(st.sampled_from(self.world.startable())), memory=memory)

    @precondition(lambda self: self.world.startable())
    @rule(data=st.data(), of_stage=st.booleans())
    def fail(self, data, of_stage):
        make = data.draw(st.sampled_from(self.world.startable()))
        depths = range(make.start + 1, make.depth + 1)
        self.world.fail(make, data.draw(st.sampled_from(depths)) if of_stage and depths else None)

    @precondition(lambda self: self.world.copyable())
    @rule(fails=st.booleans())
    def finish_fork(self, fails):
        self.world.finish_fork(self.world.copyable()[0], fails)

    @precondition(lambda self: self.world.resets)
    @rule(data=st.data())
    def finish_reset(self, data):
        sandbox = data.draw(st.sampled_from(self.world.resets))
        depth = self.world.state.instances[sandbox].depth
        self.world.finish_reset(sandbox, data.draw(st.sampled_from([None, 1, depth, depth])))

    @precondition(lambda self: self.world.destroying)
    @rule(data=st.data())
    def finish_destroy(self, data):
        self.world.finish_destroy(data.draw(st.sampled_from(self.world.destroying)))

    @precondition(lambda self: self.world.leased)
    @rule(data=st.data())
    def give_back(self, data):
        self.world.give_back(data.draw(st.sampled_from(sorted(self.world.leased))))

    @precondition(lambda self: self.world.leased)
    @rule(data=st.data())
    def keep_alive(self, data):
        request = data.draw(st.sampled_from(sorted(self.world.leased)))
        self.world.tell("keep_alive", request, self.world.now + 50)
        self.world.pass_time(49.0)
        assert request in self.world.leased

    @precondition(lambda self: self.world.open())
    @rule(data=st.data())
    def withdraw(self, data):
        request = data.draw(st.sampled_from(self.world.open()))
        del self.world.waiting[request]
        self.world.tell("withdraw", request, self.world.now)

    @precondition(lambda self: self.world.existing - self.world.busy - set(self.world.destroying))
    @rule(data=st.data())
    def die(self, data):
        alive = self.world.existing - self.world.busy - set(self.world.destroying)
        dead = data.draw(st.sampled_from(sorted(alive)))
        self.world.leased = {
            r: tuple(s for s in leased if s != dead) for r, leased in self.world.leased.items()
        }
        self.world.tell("died", dead, self.world.now)

    @precondition(lambda self: self.world.leased)
    @rule(data=st.data())
    def turns_out_dead(self, data):
        request = data.draw(st.sampled_from(sorted(self.world.leased)))
        if not self.world.leased[request]:
            return
        dead = self.world.leased.pop(request)[0]
        del self.world.answers[request]
        self.world.tell("undelivered", request, [dead], self.world.now)

    @rule(wanted=chains, count=st.integers(1, 4))
    def hint(self, wanted, count):
        self.world.tell("hint", wanted, count, self.world.now)

    @rule(wanted=chains, low=st.integers(0, 2), high=st.sampled_from([None, 2, 3]))
    def set_bounds(self, wanted, low, high):
        self.world.tell("set_bounds", wanted, low, high)

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 100.0]))
    def pass_time(self, seconds):
        self.world.pass_time(seconds)

    @invariant()
    def promises_hold(self):
        self.world.check()

    def teardown(self):
        """From any state, if everything succeeds from now on, every request is answered."""
        world = self.world
        for _ in range(1000):
            world.settle()
            if not world.leased:
                break
            world.give_back(min(world.leased))
        assert not world.open(), "no request is lost, none starves"
        assert not world.state.claims
        assert not world.state.queue
        assert not world.state.jobs
        assert world.state.stock.idle == world.state.stock.alive == len(world.existing)
        self.same_events_same_operations()

    def same_events_same_operations(self):
        twin, operations = State(BUDGET, self.policy), []
        for event, arguments, named in self.world.log:
            if event == "decide":
                operations.append(decide(twin, *arguments))
            else:
                getattr(twin, event)(*arguments, **named)
        assert operations == self.world.seen


class RulesOfAnExactMatchPool(Rules):
    policy = Policy(partial=False, join=False, fork=False, deepest_layer=1, backoff=2.0)


class RulesWithoutAPool(Rules):
    policy = Policy(park=False, fork=False, starting=3)


TestRules = Rules.TestCase
TestRulesOfAnExactMatchPool = RulesOfAnExactMatchPool.TestCase
TestRulesWithoutAPool = RulesWithoutAPool.TestCase
for case in (TestRules, TestRulesOfAnExactMatchPool, TestRulesWithoutAPool):
    case.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
del case  # so that pytest does not collect it twice
