import torch, torch.nn as nn, torch.nn.functional as F, pytest
R=lambda *s: torch.randn(*s, requires_grad=True)
def test_gqa(check):
    check(lambda q,k,v: F.scaled_dot_product_attention(q,k,v,enable_gqa=True,is_causal=True), R(2,6,5,8),R(2,2,5,8),R(2,2,5,8), rtol=1e-4,atol=1e-5)
def test_vsize(check):
    check(lambda q,k,v: F.scaled_dot_product_attention(q,k,v), R(2,2,5,8),R(2,2,5,8),R(2,2,5,4), rtol=1e-4,atol=1e-5)
def test_boolmask(check):
    check(lambda q,k,v,m: F.scaled_dot_product_attention(q,k,v,attn_mask=m), R(2,2,5,8),R(2,2,5,8),R(2,2,5,8), torch.rand(5,5)>0.3, rtol=1e-4,atol=1e-5)
def test_dyn(check):
    made=check(lambda x,w,b: F.layer_norm((x@w).view(-1,7)+x.shape[0], (7,), b).softmax(-1).sum(0), R(6,5),R(5,7),R(7), dynamic=True, rtol=1e-4)
    print([m.metadata for m in made])
def test_dyn2(check):
    def f(x,i,w):
        e=F.embedding(i,w)+x
        q=e.view(*i.shape,2,4).transpose(1,2)
        o=F.scaled_dot_product_attention(q,q,q,is_causal=True).transpose(1,2).reshape(i.shape[0],i.shape[1],8)
        return torch.cat([o,x],1)[:,1:], F.gelu(o).mean()
    check(f, R(3,6,8), torch.randint(0,9,(3,6)), R(9,8), dynamic=True, rtol=1e-4,atol=1e-5)
def test_alias(check):
    def f(x):
        y=x*2
        return y, y.clone(), y.t(), x.clone(), x.view(-1), y[1:], x.expand(2,3,4), y.exp().expand(5,3,4)
    check(f, R(3,4))
def test_bn(check):
    m=nn.BatchNorm2d(3); m2=nn.BatchNorm2d(3)
    x=torch.randn(4,3,5,5)
    from torch._dynamo.backends.common import aot_autograd
def test_compile_bn(aot_compiler):
    from torch._dynamo.backends.common import aot_autograd
    from luban.compiler.frontend.torch import table
    a,b=(nn.Sequential(nn.Conv2d(2,4,3,2,1),nn.BatchNorm2d(4),nn.ReLU(),nn.MaxPool2d(3,2,1),nn.ConvTranspose2d(4,3,3,2,1,1,groups=1),nn.Dropout(0.0)) for _ in range(2))
    b.load_state_dict(a.state_dict())
    made=[]
    c=torch.compile(b,backend=aot_autograd(fw_compiler=aot_compiler(made),bw_compiler=aot_compiler(made),decompositions=table()))
    for k in range(2):
        x=torch.randn(3,2,9,9)
        p,q=a(x),c(x)
        torch.testing.assert_close(p,q,rtol=1e-4,atol=1e-5)
        p.square().sum().backward(); q.square().sum().backward()
    for u,v in zip(a.parameters(),b.parameters()): torch.testing.assert_close(u.grad,v.grad,rtol=1e-3,atol=1e-4)
    for u,v in zip(a.buffers(),b.buffers()): torch.testing.assert_close(u,v)
    a.eval(); b.eval()
    torch.testing.assert_close(a(x),c(x),rtol=1e-4,atol=1e-5)
    with torch.no_grad(): torch.testing.assert_close(a(x),c(x),rtol=1e-4,atol=1e-5)
def test_mutation(aot_compiler):
    from torch._dynamo.backends.common import aot_autograd
    from luban.compiler.frontend.torch import table
    made=[]
    def f(x,n):
        n.add_(x.sum()); x.mul_(2)
        return x+n
    x,n=torch.randn(3,4).t(),torch.zeros(()); x2,n2=x.clone(),n.clone()
    c=torch.compile(f,backend=aot_autograd(fw_compiler=aot_compiler(made),bw_compiler=aot_compiler(made),decompositions=table(),keep_inference_input_mutations=True))
    torch.testing.assert_close(c(x,n),f(x2,n2)); torch.testing.assert_close(x,x2); torch.testing.assert_close(n,n2)
    print(made[0].metadata)
def test_lstm(check):
    m=nn.LSTM(4,5,2,batch_first=True)
    from torch.func import functional_call
    ps=dict(m.named_parameters())
    check(lambda x,*p: functional_call(m,dict(zip(ps,p)),(x,))[0], R(2,6,4), *[p.detach().clone().requires_grad_() for p in ps.values()], rtol=1e-4,atol=1e-5)
def test_mha(check):
    m=nn.TransformerEncoderLayer(8,2,16,0.0,batch_first=True)
    from torch.func import functional_call
    ps=dict(m.named_parameters())
    check(lambda x,*p: functional_call(m,dict(zip(ps,p)),(x,)), R(2,6,8), *[p.detach().clone().requires_grad_() for p in ps.values()], rtol=1e-4,atol=1e-5)
