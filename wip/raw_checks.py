import torch, sys
import transformer_engine.pytorch
import transformer_engine_torch as tex
print(tex.__file__, tex.grouped_operand_layout(torch.zeros(3,4,8)))
from transformer_engine.pytorch.constants import TE_DType
def call(A,B,D,out=torch.float32,ta=False,tb=True,splits=(2,3),bias=None,single=False,grad=True,n=2):
    e=[torch.empty(0)]*n
    try: tex.te_general_grouped_gemm(A,ta,B,tb,D,TE_DType[out],list(splits),bias or e,TE_DType[torch.bfloat16],single,e,grad,[torch.empty(16,dtype=torch.uint8)],16,True,False,0)
    except Exception as x: print(type(x).__name__, str(x).split('\n')[0][-260:])
X=[torch.zeros(2,8),torch.zeros(3,8)]; Y=[torch.zeros(2,4),torch.zeros(3,4)]
call(X,Y,[torch.zeros(4,8),torch.zeros(8,4).t()])
call(X,Y,[torch.zeros(4,8),torch.zeros(4,7)])
call(X,Y,[torch.zeros(4,8)])
call(X,Y,[torch.zeros(4,8)]*2)
call(torch.zeros(5,8),torch.zeros(5,4),torch.zeros(2,4,8))
call(torch.zeros(5,8),torch.zeros(5,4),torch.zeros(2,4,9))
call(X,[Y[0],Y[0]],[torch.zeros(4,8)]*2)
call([x.bfloat16() for x in X],Y,[torch.zeros(4,8)]*2)
call(X,Y,[torch.zeros(4,8)]*2,bias=[torch.zeros(4),torch.zeros(5)])
