"""Tests of the actions' entry point, in StackStorm's own form."""

from run_action import Run
from st2tests.base import BaseActionTestCase


class RunTestCase(BaseActionTestCase):
    """What does not reach Steward fails, in one line that says what to do."""

    action_cls = Run

    def test_without_a_daemon(self) -> None:
        action = self.get_action_instance(config={"socket": "/nonexistent/steward.sock"})
        succeeded, result = action.run(operation="slurm.node.get", nodes="n1", cluster="")
        self.assertFalse(succeeded)
        self.assertIn("/nonexistent/steward.sock", result)
        self.assertNotIn("\n", result)

    def test_a_configuration_that_is_not_there(self) -> None:
        action = self.get_action_instance(config={"config": "/nonexistent/steward.toml"})
        succeeded, result = action.run(operation="slurm.config.get")
        self.assertFalse(succeeded)
        self.assertIn("/nonexistent/steward.toml", result)
