"""PPO on an environment of the host: rollouts under no_grad, actions that go to the host, advantages, minibatches, early stop by KL."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

ENVIRONMENTS, HORIZON, OBSERVATION, ACTIONS, EPOCHS, MINIBATCHES = 16, 64, 64, 6, 4, 4


class Environment:
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def reset(self):
        return self.rng.standard_normal((ENVIRONMENTS, OBSERVATION), dtype=np.float32)

    def step(self, actions):
        assert actions.shape == (ENVIRONMENTS,) and ((actions >= 0) & (actions < ACTIONS)).all()
        return self.reset(), (actions == 0).astype(np.float32), self.rng.random(ENVIRONMENTS) < 0.05


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBSERVATION, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh())
        self.policy, self.critic = nn.Linear(512, ACTIONS), nn.Linear(512, 1)

    def forward(self, x, allowed, action=None):
        hidden = self.body(x)
        logits = self.policy(hidden).masked_fill(~allowed, -1e8)
        chosen = Categorical(logits=logits)
        action = chosen.sample() if action is None else action
        return action, chosen.log_prob(action), chosen.entropy(), self.critic(hidden).squeeze(-1)


device = torch.device("cuda")
env, agent = Environment(), Agent().to(device)
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
state = torch.tensor(env.reset(), device=device)
done = torch.zeros(ENVIRONMENTS, device=device)
shape = (HORIZON, ENVIRONMENTS)
states = torch.zeros((*shape, OBSERVATION), device=device)
actions, logs, rewards, ends, values = (torch.zeros(shape, device=device) for _ in range(5))
masks = torch.zeros((*shape, ACTIONS), dtype=torch.bool, device=device)
for update in range(3):
    for time in range(HORIZON):
        allowed = torch.rand(ENVIRONMENTS, ACTIONS) > 0.3
        allowed[:, 0] = True
        states[time], ends[time], masks[time] = state, done, allowed.to(device)
        with torch.no_grad():
            action, logs[time], _, values[time] = agent(state, masks[time])
        actions[time] = action
        seen, reward, over = env.step(action.cpu().numpy())
        rewards[time] = torch.tensor(reward).to(device)
        state, done = torch.Tensor(seen).to(device), torch.Tensor(over).to(device)
    with torch.no_grad():
        following = agent(state, masks[-1])[3]
        advantages, last = torch.zeros_like(rewards), 0
        for time in reversed(range(HORIZON)):
            going = 1.0 - (done if time == HORIZON - 1 else ends[time + 1])
            after = following if time == HORIZON - 1 else values[time + 1]
            delta = rewards[time] + 0.99 * after * going - values[time]
            advantages[time] = last = delta + 0.99 * 0.95 * going * last
        returns = advantages + values
    order = np.arange(HORIZON * ENVIRONMENTS)
    for epoch in range(EPOCHS):
        np.random.shuffle(order)
        for picked in np.array_split(order, MINIBATCHES):
            _, log, entropy, value = agent(states.flatten(0, 1)[picked], masks.flatten(0, 1)[picked], actions.flatten()[picked].long())
            ratio = (log - logs.flatten()[picked]).exp()
            kl = ((ratio - 1) - ratio.log()).mean()
            advantage = advantages.flatten()[picked]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            clipped = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
            loss = clipped + 0.5 * (value - returns.flatten()[picked]).square().mean() - 0.01 * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
        if kl > 1.5:
            break
    print(update, rewards.mean().item())
