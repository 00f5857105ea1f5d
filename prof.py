import torch, time, sys
import vitascope as vs
from vitascope.training.whitening import *
from vitascope.training import whitening
from vitascope.training.optimizers import optimizer_of
from vitascope.training.options.recipes import RECIPES
depth=int(sys.argv[1]); 
m = vs.create_model("cct_2_3x6", num_classes=10, depth=depth)
whitening.add_norms(m.patch_embedding)
m.train()
opt = optimizer_of(m, RECIPES["small-data"].optimization)
for g in opt.param_groups: g["lr"]=1e-3
x = torch.rand(64,3,32,32); y=torch.randint(10,(64,))
def step():
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(m(x).float(), y)
    loss.backward(); opt.step(); opt.zero_grad()
for _ in range(3): step()
t=time.time()
for _ in range(10): step()
print("ms/step", (time.time()-t)*100)
with torch.profiler.profile() as p:
    for _ in range(5): step()
print(p.key_averages().table(sort_by="self_cpu_time_total", row_limit=28, max_name_column_width=45))
