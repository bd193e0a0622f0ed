# python -m mpicoll.run -n 3 examples/rpc_reinforce.py
"""Reinforcement learning by remote calls: one agent learns to balance a pole from what observers on the other ranks play.

    rank 0: the agent, with the policy            ranks 1, 2 ...: observers, each with a cart and a pole on it
    [1] asks every observer for its episodes  ->  [2] asks the agent for the actions, moves the carts
    [3] takes that call, draws actions        <-
    [4] when all episodes are played: one step of REINFORCE, and again

Two references make the round trip: the agent holds an RRef to each observer, and hands each an RRef to itself. Episodes are
shared out among the observers and each draws from its own random numbers, so that the agent learns the same, however many
ranks there are; a single rank is its own observer.
"""

import math
import statistics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import mpicoll as dist
from mpicoll import rpc
from mpicoll.rpc import RRef

ROUNDS, EPISODES = 18, 8  # EPISODES in each round, for all observers together
LONGEST = 100  # steps; an episode ends here, or when the pole falls
DISCOUNT = 0.97


class CartPole:
    """A cart on a rail, pushed to the left or to the right, with a pole that stands on it (Barto, Sutton and Anderson, 1983)."""

    def __init__(self, random: torch.Generator) -> None:
        nearly_upright = (torch.rand(4, generator=random) - 0.5) / 10
        self.state: list[float] = nearly_upright.tolist()  # place, speed, angle, turning; in m, s, rad

    def step(self, action: int) -> bool:
        """Moves on by 0.02 s with a push of 10 N. True while the pole stands and the cart is on the rail."""
        x, speed, angle, turning = self.state
        sin, cos = math.sin(angle), math.cos(angle)
        push = ((10 if action else -10) + 0.05 * turning**2 * sin) / 1.1  # cart 1 kg, pole 0.1 kg and 1 m
        falling = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        pushed = push - 0.05 * falling * cos / 1.1
        self.state = [x + 0.02 * speed, speed + 0.02 * pushed, angle + 0.02 * turning, turning + 0.02 * falling]
        return abs(self.state[0]) < 2.4 and abs(self.state[2]) < math.radians(12)


class Observer:
    """Lives on one of the ranks, sees the carts, and does not know the policy."""

    def play(self, agent: "RRef[Agent]", episodes: list[int]) -> dict[int, int]:
        """Plays these episodes side by side: the steps that the pole stood in each, which are its return."""
        carts = {episode: CartPole(torch.Generator().manual_seed(episode)) for episode in episodes}
        returns = dict.fromkeys(episodes, LONGEST)
        step = 0
        while carts and step < LONGEST:
            step += 1
            actions = agent.rpc_sync().select_actions({episode: cart.state for episode, cart in carts.items()})  # [2]
            for episode, action in actions.items():
                if not carts[episode].step(action):
                    returns[episode] = step
                    del carts[episode]
        return returns


class Agent:
    """Has the policy: which way to push in a state. Observers call ``select_actions``, several at a time."""

    def __init__(self, observers: list[RRef[Observer]]) -> None:
        torch.manual_seed(0)
        self.policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).double()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.03)
        self.observers = observers
        self.me = RRef(self)

    def select_actions(self, states: dict[int, list[float]]) -> dict[int, int]:
        """[3] Draws an action in each of these episodes. They share nothing but the weights, which rest meanwhile: no lock."""
        with torch.no_grad():
            odds = self.policy(torch.tensor(list(states.values()), dtype=torch.float64)).softmax(dim=1)
        actions = {}
        for (episode, state), row in zip(states.items(), odds, strict=True):
            actions[episode] = int(torch.multinomial(row, 1, generator=self.random[episode]))
            self.states[episode].append(state)
            self.actions[episode].append(actions[episode])
        return actions

    def round(self, number: int) -> float:
        """Has a round played and learns from it: the mean return of its episodes."""
        episodes = list(range(number * EPISODES, (number + 1) * EPISODES))
        self.random = {episode: torch.Generator().manual_seed(1_000_000 + episode) for episode in episodes}
        self.states: dict[int, list[list[float]]] = {episode: [] for episode in episodes}
        self.actions: dict[int, list[int]] = {episode: [] for episode in episodes}
        playing = [
            observer.rpc_async(timeout=0).play(self.me, episodes[i :: len(self.observers)])  # [1]
            for i, observer in enumerate(self.observers)
        ]
        returns: list[int] = [steps for future in playing for steps in future.wait().values()]
        self.learn(episodes)
        return statistics.mean(returns)

    def learn(self, episodes: list[int]) -> None:
        """[4] Makes actions likelier by what came after them: the discounted steps that the pole still stood."""
        states = torch.tensor([state for episode in episodes for state in self.states[episode]], dtype=torch.float64)
        actions = torch.tensor([action for episode in episodes for action in self.actions[episode]])
        after = torch.cat([still_standing(len(self.actions[episode])) for episode in episodes])
        advantage = (after - after.mean()) / after.std()
        loss = (cross_entropy(self.policy(states), actions, reduction="none") * advantage).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def still_standing(steps: int) -> Tensor:
    """For each step of an episode, the discounted number of those that follow, itself included."""
    return (1 - DISCOUNT ** torch.arange(steps, 0, -1, dtype=torch.float64)) / (1 - DISCOUNT)


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        agent = Agent([rpc.remote(f"worker{other}", Observer) for other in range(1, size) or [0]])
        returns = []
        for number in range(ROUNDS):
            returns.append(agent.round(number))
            if number % 4 == 0 or number == ROUNDS - 1:
                print(f"round {number:2d}: the pole stood for {returns[-1]:5.1f} steps of {LONGEST}")
        first, last = returns[0], statistics.mean(returns[-4:])
        print(f"rpc_reinforce: mean return {first:.1f} -> {last:.1f} steps with {max(size - 1, 1)} observer(s)")
    rpc.shutdown()  # observers serve until the agent comes here, too
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
