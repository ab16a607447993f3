"""The weights of a round that begins ahead are counted twice, where one may begin ahead."""

from known_sizes import SMOLLM2, config

from jaxrl.run.memory import memory_plan, memory_problem

NAME = "rollout weights of the next round"


def test_weights_of_two_versions():
    rollout = {"num_workers": 2, "num_devices": 2, "ranking_groups": {"enable": True}}
    c = config(rollout=rollout, trainer={"one_step_off": True})
    plan = memory_plan(c, SMOLLM2, 4, None, "cpu")
    assert plan.rollout[NAME] == plan.rollout["rollout weights"]
    text = memory_problem(c, SMOLLM2, plan, 4, 1 << 20)
    assert text is not None
    assert text.endswith("use more devices, or a smaller model")
    filtering = config(rollout=rollout, trainer={"one_step_off": True}, algorithm={"filter_groups": {"enable": True}})
    assert NAME not in memory_plan(filtering, SMOLLM2, 4, None, "cpu").rollout, "a clock may not decide when it begins"
