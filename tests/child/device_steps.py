"""Training steps that ask hard things of the device. `build` picks one by its name, so that one process serves them all."""

import gc
import io
import os
import threading
from itertools import pairwise

import torch
import torch._inductor.config
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

MIB = 2**20


def build(device, program, **values):
    """The step of the function *program* of this file."""
    return globals()[program](device, **values)


def operator(device, name):
    """One of OPERATORS, forward and, where its result can be differentiated, backward."""

    def step():
        torch.manual_seed(0)
        results = OPERATORS[name](device)
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, torch.Tensor) and result.requires_grad:
                (result.real if result.is_complex() else result).float().sum().backward()
                break

    return step


def _leaf(device, *shape, dtype=torch.float32):
    return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)


def _layer(layer, device, *shape):
    return layer.to(device)(_leaf(device, *shape))


def _accumulated(device):
    table = _leaf(device, 1000, 64)
    index = torch.randint(0, 1000, (5000,), device=device)
    return table.clone().index_put((index,), torch.ones(5000, 64, device=device), accumulate=True)


def _ctc(device, *, through_cudnn):
    likelihood = _leaf(device, 50, 16, 20).log_softmax(2)
    if through_cudnn:
        return functional.ctc_loss(likelihood, torch.randint(1, 20, (480,), dtype=torch.int32), [50] * 16, [30] * 16)
    lengths = torch.full((16,), 50, dtype=torch.int32), torch.full((16,), 30, dtype=torch.int32)
    return functional.ctc_loss(likelihood, torch.randint(1, 20, (16, 30), device=device), *lengths)


def _sparse(device, *, is_coalesced):
    """Two rows and three columns. Where it is not coalesced, PyTorch counts on the device how many elements are left: none."""
    indices = torch.tensor([[0, 1, 1], [2, 0, 2]], device=device)
    return torch.sparse_coo_tensor(indices, torch.ones(3, device=device), (2, 3), is_coalesced=is_coalesced)


def _rows(device, *, requires_grad=False):
    return torch.ones(64, 32).to_sparse_csr().to(device).requires_grad_(requires_grad)


def _symmetric(device):
    return _leaf(device, 64, 64) + torch.eye(64, device=device)


def _attended(device, **options):
    return nn.MultiheadAttention(64, 4, batch_first=True, device=device, **options)


def _profiled(device):
    with torch.profiler.profile():
        return torch.ones(10, device=device) * 2


def _second_order(device):
    layer = nn.Linear(64, 64, device=device)
    gradients = torch.autograd.grad(layer(_leaf(device, 8, 64)).square().sum(), layer.parameters(), create_graph=True)
    return sum(gradient.square().sum() for gradient in gradients)


def _vmapped(device):
    layer = nn.Linear(64, 64, device=device)

    def loss(parameters, sample):
        return torch.func.functional_call(layer, parameters, (sample,)).sum()

    parameters = {name: weight.detach() for name, weight in layer.named_parameters()}
    return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, torch.randn(8, 64, device=device))


def _in_a_pool(device):
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        return torch.ones(2**20, device=device)


OPERATORS = {
    "fft": lambda device: torch.fft.rfft2(_leaf(device, 4, 256, 256)),
    "inverse_fft": lambda device: torch.fft.irfft2(_leaf(device, 4, 256, 129, dtype=torch.complex64)),
    "stft": lambda device: torch.stft(_leaf(device, 4, 16000), 400, return_complex=True, window=torch.hann_window(400, device=device)),
    "complex_abs": lambda device: _leaf(device, 100, 100, dtype=torch.complex64).abs(),
    "complex_product": lambda device: (_leaf(device, 64, 64, dtype=torch.complex64) @ _leaf(device, 64, 64, dtype=torch.complex64)).prod(),
    "complex_exp_angle": lambda device: _leaf(device, 100, dtype=torch.complex64).exp().angle(),
    "sort": lambda device: _leaf(device, 100, 5000).sort(stable=True),
    "argsort_one_row": lambda device: torch.randn(200_000, device=device).argsort(),
    "topk": lambda device: _leaf(device, 100, 5000).topk(50),
    "kthvalue": lambda device: _leaf(device, 100, 5000).kthvalue(7),
    "median": lambda device: _leaf(device, 100, 501).median(1),
    "mode": lambda device: torch.randint(0, 9, (100, 50), device=device).mode(),
    "quantile": lambda device: _leaf(device, 1000).quantile(0.9),
    "unique": lambda device: torch.randint(0, 50, (1000,), device=device).unique(return_inverse=True, return_counts=True),
    "unique_rows": lambda device: torch.randint(0, 5, (1000, 2), device=device).unique(dim=0),
    "unique_consecutive": lambda device: torch.randint(0, 5, (1000,), device=device).unique_consecutive(return_counts=True),
    "nonzero": lambda device: (torch.randn(1000, device=device) > 0).nonzero(),
    "masked_select": lambda device: _leaf(device, 1000)[torch.ones(1000, dtype=torch.bool, device=device)],
    "masked_scatter": lambda device: _leaf(device, 100).masked_scatter(
        torch.ones(100, device=device).bool(), torch.ones(100, device=device)
    ),
    "where": lambda device: torch.where(torch.ones(10, device=device).bool(), _leaf(device, 10), 0.0),
    "multinomial": lambda device: torch.softmax(torch.randn(64, 1000, device=device), 1).multinomial(5),
    "multinomial_with_replacement": lambda device: torch.ones(64, 1000, device=device).multinomial(5000, replacement=True),
    "bincount": lambda device: torch.randint(0, 50, (1000,), device=device).bincount(minlength=50),
    "histc": lambda device: torch.randn(1000, device=device).histc(50),
    "searchsorted": lambda device: torch.searchsorted(torch.arange(100.0, device=device), torch.randn(50, device=device)),
    "randperm": lambda device: torch.randperm(100_000, device=device),
    "cumsum": lambda device: _leaf(device, 100, 5000).cumsum(1),
    "cumsum_flat": lambda device: _leaf(device, 500_000).cumsum(0),
    "cumprod": lambda device: _leaf(device, 100, 50).cumprod(1),
    "logcumsumexp": lambda device: _leaf(device, 100, 50).logcumsumexp(1),
    "cummax": lambda device: _leaf(device, 100, 50).cummax(1),
    "embedding": lambda device: nn.Embedding(1000, 64, device=device)(torch.randint(0, 1000, (64, 512), device=device)),
    "embedding_padded": lambda device: nn.Embedding(100, 64, padding_idx=0, max_norm=1.0, device=device)(
        torch.ones(8, 8, device=device).long()
    ),
    "embedding_bag": lambda device: nn.EmbeddingBag(1000, 64, device=device)(torch.randint(0, 1000, (64, 16), device=device)),
    "embedding_bag_max": lambda device: nn.EmbeddingBag(1000, 64, mode="max", device=device)(
        torch.randint(0, 1000, (64, 16), device=device)
    ),
    "embedding_sparse": lambda device: nn.Embedding(1000, 64, sparse=True, device=device)(torch.randint(0, 1000, (64,), device=device)),
    "index_put": _accumulated,
    "index_select": lambda device: _leaf(device, 100, 64).index_select(0, torch.arange(50, device=device)),
    "index_add": lambda device: _leaf(device, 100, 64).index_add(0, torch.arange(50, device=device), torch.ones(50, 64, device=device)),
    "scatter_add": lambda device: _leaf(device, 9, 9).scatter_add(
        0, torch.zeros(9, 9, device=device).long(), torch.ones(9, 9, device=device)
    ),
    "scatter_amax": lambda device: _leaf(device, 9, 9).scatter_reduce(
        0, torch.zeros(9, 9, device=device).long(), _leaf(device, 9, 9), "amax"
    ),
    "gather": lambda device: _leaf(device, 9, 9).gather(0, torch.zeros(9, 9, device=device).long()),
    "take_along_dim": lambda device: _leaf(device, 9, 9).take_along_dim(torch.zeros(9, 9, device=device).long(), 1),
    "repeat_interleave": lambda device: _leaf(device, 10, 4).repeat_interleave(torch.ones(10, device=device).long(), 0, output_size=10),
    "bmm": lambda device: torch.bmm(_leaf(device, 8, 64, 32), _leaf(device, 8, 32, 64)),
    "baddbmm_half": lambda device: torch.baddbmm(*(_leaf(device, 8, 64, 64, dtype=torch.float16) for _ in range(3))),
    "einsum": lambda device: torch.einsum("bhid,bhjd->bhij", _leaf(device, 2, 4, 64, 32), _leaf(device, 2, 4, 64, 32)),
    "addmv": lambda device: torch.addmv(_leaf(device, 64), _leaf(device, 64, 32), _leaf(device, 32)),
    "dot": lambda device: torch.dot(_leaf(device, 64), _leaf(device, 64)),
    "double_product": lambda device: _leaf(device, 64, 32, dtype=torch.float64) @ _leaf(device, 32, 64, dtype=torch.float64),
    "integer_product": lambda device: torch._int_mm(*(torch.ones(64, 64, dtype=torch.int8, device=device) for _ in range(2))),
    "fp8_product": lambda device: torch._scaled_mm(
        torch.ones(64, 64, device=device).to(torch.float8_e4m3fn),
        torch.ones(64, 64, device=device).to(torch.float8_e4m3fn).t(),
        torch.ones((), device=device),
        torch.ones((), device=device),
        out_dtype=torch.bfloat16,
    ),
    "cdist": lambda device: torch.cdist(_leaf(device, 50, 8), _leaf(device, 60, 8)),
    "cosine_similarity": lambda device: functional.cosine_similarity(_leaf(device, 50, 8), _leaf(device, 50, 8)),
    "layer_norm": lambda device: _layer(nn.LayerNorm(256), device, 64, 256),
    "rms_norm": lambda device: _layer(nn.RMSNorm(256), device, 64, 256),
    "group_norm": lambda device: _layer(nn.GroupNorm(8, 64), device, 8, 64, 16, 16),
    "instance_norm": lambda device: _layer(nn.InstanceNorm2d(64, affine=True), device, 8, 64, 16, 16),
    "batch_norm": lambda device: _layer(nn.BatchNorm2d(64), device, 8, 64, 16, 16),
    "batch_norm_channels_last": lambda device: nn.BatchNorm2d(64, device=device)(
        _leaf(device, 8, 64, 16, 16).contiguous(memory_format=torch.channels_last)
    ),
    "batch_norm_half": lambda device: nn.BatchNorm2d(64, device=device)(_leaf(device, 8, 64, 16, 16, dtype=torch.float16)),
    "batch_norm_eval": lambda device: _layer(nn.BatchNorm2d(64).eval(), device, 8, 64, 16, 16),
    "conv1d": lambda device: _layer(nn.Conv1d(16, 32, 3), device, 8, 16, 100),
    "conv3d": lambda device: _layer(nn.Conv3d(4, 8, 3), device, 2, 4, 16, 16, 16),
    "conv_depthwise": lambda device: _layer(nn.Conv2d(32, 32, 3, groups=32), device, 8, 32, 16, 16),
    "conv_transpose": lambda device: _layer(nn.ConvTranspose2d(32, 16, 2, 2), device, 8, 32, 16, 16),
    "conv_dilated": lambda device: _layer(nn.Conv2d(32, 16, 3, dilation=2), device, 8, 32, 16, 16),
    "max_pool": lambda device: _layer(nn.MaxPool2d(2), device, 8, 32, 16, 16),
    "adaptive_pool": lambda device: _layer(nn.AdaptiveAvgPool2d(7), device, 8, 32, 16, 16),
    "fractional_pool": lambda device: _layer(nn.FractionalMaxPool2d(2, output_size=7), device, 8, 32, 16, 16),
    "unfold": lambda device: _layer(nn.Unfold(3), device, 8, 4, 16, 16),
    "pixel_shuffle": lambda device: _layer(nn.PixelShuffle(2), device, 8, 16, 16, 16),
    "pad_reflect": lambda device: functional.pad(_leaf(device, 8, 4, 16, 16), (1, 1, 1, 1), mode="reflect"),
    "grid_sample": lambda device: functional.grid_sample(_leaf(device, 4, 3, 32, 32), _leaf(device, 4, 32, 32, 2), align_corners=False),
    "affine_grid": lambda device: functional.affine_grid(_leaf(device, 4, 2, 3), [4, 3, 32, 32], align_corners=False),
    "ctc_loss": lambda device: _ctc(device, through_cudnn=False),
    "ctc_loss_cudnn": lambda device: _ctc(device, through_cudnn=True),
    "cross_entropy": lambda device: functional.cross_entropy(_leaf(device, 64, 1000), torch.randint(0, 1000, (64,), device=device)),
    "dropout": lambda device: functional.dropout(_leaf(device, 64, 1000)),
    "multi_head_attention": lambda device: _attended(device)(*[_leaf(device, 8, 32, 64)] * 3, need_weights=False),
    "multi_head_attention_eval": lambda device: (
        _attended(device).eval().requires_grad_(False)(*[torch.randn(8, 32, 64, device=device)] * 3)
    ),
    "transformer_nested": lambda device: nn.TransformerEncoderLayer(64, 4, batch_first=True, device=device)(_leaf(device, 8, 32, 64)),
    "nested_tensor": lambda device: (
        torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged, device=device).sin().values()
    ),
    "interpolate": lambda device: functional.interpolate(_leaf(device, 4, 3, 32, 32), scale_factor=2, mode="bilinear"),
    "interpolate_bicubic": lambda device: functional.interpolate(
        _leaf(device, 4, 3, 32, 32), scale_factor=2, mode="bicubic", antialias=True
    ),
    "weight_norm": lambda device: nn.utils.parametrizations.weight_norm(nn.Linear(64, 64, device=device))(_leaf(device, 8, 64)),
    "spectral_norm": lambda device: nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64, device=device))(_leaf(device, 8, 64)),
    "orthogonal": lambda device: nn.utils.parametrizations.orthogonal(nn.Linear(64, 64, device=device), orthogonal_map="householder")(
        _leaf(device, 8, 64)
    ),
    "checkpointed": lambda device: torch.utils.checkpoint.checkpoint(
        nn.Linear(64, 64, device=device), _leaf(device, 8, 64), use_reentrant=False
    ),
    "clip_grad_norm": lambda device: nn.utils.clip_grad_norm_([nn.Parameter(torch.ones(8, device=device))], 1.0),
    "poisson": lambda device: torch.poisson(torch.rand(100, device=device)) + torch.empty(100, device=device).exponential_(),
    "bernoulli": lambda device: torch.bernoulli(torch.rand(100, device=device)),
    "gamma": lambda device: torch._standard_gamma(_leaf(device, 100).abs()),
    "lgamma_digamma": lambda device: _leaf(device, 100).lgamma() + _leaf(device, 100).digamma(),
    "special_bessel": lambda device: torch.special.bessel_j0(torch.randn(100, device=device)),
    "igamma": lambda device: torch.igamma(_leaf(device, 10).abs().detach(), _leaf(device, 10).abs()),
    "fake_quantize": lambda device: torch.fake_quantize_per_tensor_affine(_leaf(device, 10), 0.1, 0, 0, 255),
    "segment_reduce": lambda device: torch.segment_reduce(
        _leaf(device, 10), "sum", lengths=torch.tensor([4, 6], device=device), unsafe=True
    ),
    "foreach_norm": lambda device: torch._foreach_norm([torch.ones(10, device=device), torch.ones(20, device=device)]),
    "tril_indices": lambda device: torch.tril_indices(100, 100, device=device),
    "cholesky": lambda device: torch.linalg.cholesky(_symmetric(device)),
    "cholesky_batch": lambda device: torch.linalg.cholesky(torch.eye(8, device=device).expand(64, 8, 8).clone()),
    "cholesky_solve": lambda device: torch.cholesky_solve(torch.ones(64, 1, device=device), torch.eye(64, device=device)),
    "qr": lambda device: torch.linalg.qr(_symmetric(device)),
    "eigh": lambda device: torch.linalg.eigh(_symmetric(device)),
    "eigh_batch": lambda device: torch.linalg.eigh(torch.eye(16, device=device).expand(64, 16, 16).clone()),
    "eig": lambda device: torch.linalg.eig(torch.eye(64, device=device)),
    "svd": lambda device: torch.linalg.svd(_symmetric(device)),
    "svdvals_batch": lambda device: torch.linalg.svdvals(torch.eye(16, device=device).expand(64, 16, 16).clone()),
    "svd_lowrank": lambda device: torch.svd_lowrank(torch.randn(64, 64, device=device)),
    "solve": lambda device: torch.linalg.solve(_symmetric(device), torch.ones(64, device=device)),
    "solve_batch": lambda device: torch.linalg.solve(
        torch.eye(8, device=device).expand(64, 8, 8).clone(), torch.ones(64, 8, 1, device=device)
    ),
    "solve_triangular": lambda device: torch.linalg.solve_triangular(_symmetric(device), torch.ones(64, 1, device=device), upper=True),
    "inv": lambda device: torch.linalg.inv(_symmetric(device)),
    "inv_batch": lambda device: torch.linalg.inv(torch.eye(8, device=device).expand(64, 8, 8).clone()),
    "pinv": lambda device: torch.linalg.pinv(_symmetric(device)),
    "det": lambda device: torch.linalg.det(_symmetric(device)),
    "slogdet": lambda device: torch.linalg.slogdet(_symmetric(device)),
    "lstsq": lambda device: torch.linalg.lstsq(torch.ones(64, 8, device=device), torch.ones(64, 1, device=device)).solution,
    "lu_factor": lambda device: torch.linalg.lu_factor(_symmetric(device)),
    "ldl_factor": lambda device: torch.linalg.ldl_factor(torch.eye(64, device=device)),
    "householder_product": lambda device: torch.linalg.householder_product(torch.ones(64, 8, device=device), torch.ones(8, device=device)),
    "multivariate_normal": lambda device: torch.distributions.MultivariateNormal(
        torch.zeros(8, device=device), torch.eye(8, device=device) + _leaf(device, 8, 8)
    ).log_prob(torch.zeros(8, device=device)),
    "matrix_exp": lambda device: torch.linalg.matrix_exp(_symmetric(device)),
    "matrix_power": lambda device: torch.linalg.matrix_power(_symmetric(device), 5),
    "sparse_product": lambda device: torch.sparse.mm(_sparse(device, is_coalesced=False), _leaf(device, 3, 4)),
    "sparse_product_coalesced": lambda device: torch.sparse.mm(_sparse(device, is_coalesced=True).requires_grad_(), _leaf(device, 3, 4)),
    "sparse_csr": lambda device: _rows(device) @ _leaf(device, 32, 8),
    "sparse_csr_learns": lambda device: torch.sparse.mm(_rows(device, requires_grad=True), _leaf(device, 32, 8)),
    "sparse_csr_vector": lambda device: _rows(device) @ _leaf(device, 32),
    "sparse_csr_half": lambda device: _rows(device).half() @ _leaf(device, 32, 8, dtype=torch.float16),
    "sparse_sampled": lambda device: torch.sparse.sampled_addmm(_rows(device), _leaf(device, 64, 5), _leaf(device, 5, 32)).to_dense(),
    "sparse_triangular": lambda device: (
        torch.triangular_solve(torch.ones(64, 8, device=device), torch.eye(64).to_sparse_csr().to(device)).solution
    ),
    "sparse_by_sparse": lambda device: _rows(device) @ torch.ones(32, 64).to_sparse_csr().to(device),
    "sparse_to_csr": lambda device: torch.eye(64, device=device).to_sparse_csr(),
    "sparse_coalesce": lambda device: (
        torch.sparse_coo_tensor(torch.zeros(1, 9, dtype=torch.long), torch.ones(9), (4,)).to(device).coalesce()
    ),
    "semi_structured": lambda device: torch.sparse.to_sparse_semi_structured(
        torch.tensor([0, 0, 1, 1.0]).half().tile((128, 32)).to(device)
    ),
    "event_ipc": lambda _: torch.cuda.Event(interprocess=True).ipc_handle(),
    "tensor_ipc": lambda device: torch.ones(10, device=device).untyped_storage()._share_cuda_(),
    "list_gpu_processes": torch.cuda.list_gpu_processes,
    "profiled": _profiled,
    "second_order": _second_order,
    "vmapped": _vmapped,
    "saved": lambda device: torch.save(nn.Linear(64, 64, device=device), io.BytesIO()),
    "rng_state": lambda device: torch.cuda.set_rng_state(torch.cuda.get_rng_state(device), device),
    "memory_pool": _in_a_pool,
}


def _solvable(matrix):
    return matrix @ matrix.mH


def _of_columns(matrix, count):
    return torch.ones_like(matrix[..., :count])


FACTORIZATIONS = {
    "svd": torch.linalg.svd,
    "svd_reduced": lambda matrix: torch.linalg.svd(matrix[..., :7], full_matrices=False),
    "svdvals": torch.linalg.svdvals,
    "qr": torch.linalg.qr,
    "qr_wide": lambda matrix: torch.linalg.qr(matrix[..., :7, :]),
    "cholesky": lambda matrix: torch.linalg.cholesky(_solvable(matrix)),
    "cholesky_ex": lambda matrix: torch.linalg.cholesky_ex(_solvable(matrix)),
    "cholesky_solve": lambda matrix: torch.cholesky_solve(_of_columns(matrix, 3), matrix),
    "cholesky_inverse": torch.cholesky_inverse,
    "eigh": lambda matrix: torch.linalg.eigh(_solvable(matrix)),
    "eigvalsh": lambda matrix: torch.linalg.eigvalsh(_solvable(matrix)),
    "eig": torch.linalg.eig,
    "eigvals": torch.linalg.eigvals,
    "solve": lambda matrix: torch.linalg.solve(matrix, _of_columns(matrix, 3)),
    "solve_triangular": lambda matrix: torch.linalg.solve_triangular(matrix, _of_columns(matrix, 3), upper=True),
    "inv": torch.linalg.inv,
    "inv_ex": torch.linalg.inv_ex,
    "lstsq": lambda matrix: torch.linalg.lstsq(matrix[..., :7], _of_columns(matrix, 3)).solution,
    "lu": torch.linalg.lu,
    "lu_factor": torch.linalg.lu_factor,
    "lu_solve": lambda matrix: torch.linalg.lu_solve(*torch.linalg.lu_factor(matrix), _of_columns(matrix, 3)),
    "ldl_factor": lambda matrix: torch.linalg.ldl_factor(matrix.detach()),
    "ldl_solve": lambda matrix: torch.linalg.ldl_solve(*torch.linalg.ldl_factor(matrix.detach()), _of_columns(matrix, 3)),
    "det": torch.linalg.det,
    "slogdet": lambda matrix: torch.linalg.slogdet(matrix)[1],
    "pinv": torch.linalg.pinv,
    "pinv_hermitian": lambda matrix: torch.linalg.pinv(_solvable(matrix), hermitian=True),
    "matrix_rank": torch.linalg.matrix_rank,
    "householder_product": lambda matrix: torch.linalg.householder_product(matrix[..., :7], matrix[..., 0, :7]),
    "geqrf": lambda matrix: torch.geqrf(matrix.detach()),
    "ormqr": lambda matrix: torch.ormqr(*torch.geqrf(matrix.detach()), _of_columns(matrix, 3) * matrix[..., :1]),
    "pca_lowrank": torch.pca_lowrank,
    "svd_lowrank": torch.svd_lowrank,
    "cond": torch.linalg.cond,
    "nuclear_norm": lambda matrix: torch.linalg.matrix_norm(matrix, "nuc"),
}


def factorizations(device, shape, dtype, library="default"):
    """Each of FACTORIZATIONS, forward and backward."""

    def step():
        torch.backends.cuda.preferred_linalg_library(library)
        failed = {}
        for name, factorize in FACTORIZATIONS.items():
            results = factorize(_leaf(device, *shape, dtype=getattr(torch, dtype)))
            results = results if isinstance(results, tuple) else (results,)
            losses = [result.abs().sum() for result in results if result.requires_grad]
            try:
                sum(losses, torch.zeros((), device=device, requires_grad=True)).backward()
            except RuntimeError as error:
                failed[name] = error
        assert not failed, failed

    return step


def keeps_qr(device, shape):
    """Of a QR decomposition without gradients, everything is still there when the step ends."""
    kept = []

    def step():
        kept[:] = torch.linalg.qr(torch.empty(shape, device=device))

    return step


def keeps_eigenvectors(device, size):
    """The same of an eigendecomposition, whose matrix is there from the beginning."""
    matrix = torch.empty(size, size, device=device)
    kept = []

    def step():
        kept.clear()
        kept[:] = torch.linalg.eigh(matrix)

    return step


def checkpointed_svd(device):
    """A yes or no that the program reads while PyTorch computes a gradient of an SVD, and runs the forward again for it."""

    def step():
        read = []

        def forward(matrix):
            read.append(bool((matrix.real > 1e9).any()))
            return torch.linalg.svdvals(matrix).sum()  # whose gradient is the first that wants what the forward made

        torch.utils.checkpoint.checkpoint(forward, _leaf(device, 8, 8, dtype=torch.complex64), use_reentrant=False).backward()
        assert read == [False, False], read

    return step


def recurrent(device, kind="LSTM", hidden=512, projection=0, layers=2, both_ways=True, is_half=False, kept_bytes=None):
    """Two layers over 32 sequences of 100 steps; the step looks at where the weights lie and at what the forward keeps."""
    options = {"proj_size": projection} if projection else {}
    model = getattr(nn, kind)(256, hidden, layers, bidirectional=both_ways, batch_first=True, **options).to(device)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}

    def step():
        with torch.autocast("cuda", dtype=torch.float16, enabled=is_half):
            result, _ = model(torch.randn(32, 100, 256, device=device))
        assert result.shape == (32, 100, (projection or hidden) * (2 if both_ways else 1)), result.shape
        kept = _reserve(result)
        assert kept_bytes in (None, kept), kept
        result.float().mean().backward()
        weights = sorted(model.parameters(), key=lambda weight: weight.data_ptr())
        assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
        assert weights[0].untyped_storage().nbytes() == sum(weight.nbytes for weight in weights)
        for before, after in pairwise(weights):
            assert before.data_ptr() + before.nbytes == after.data_ptr()  # no gap, no overlap
        assert all(weight.grad.shape == weight.shape for weight in weights)
        assert {name: tuple(weight.shape) for name, weight in model.state_dict().items()} == shapes
        model.zero_grad()

    return step


def ctc_through_cudnn(device, lengths_are_tensors=False):
    """A loss of cuDNN: 50 time steps of 16 sequences, 20 classes, 30 labels."""
    lengths = [torch.full((16,), length, dtype=torch.int32) if lengths_are_tensors else [length] * 16 for length in (50, 30)]

    def step():
        likelihood = _leaf(device, 50, 16, 20).log_softmax(2)
        labels = torch.full((480,), 1, dtype=torch.int32)
        functional.ctc_loss(likelihood, labels, *lengths, reduction="sum").backward()

    return step


def _reserve(result):
    """Bytes of what cuDNN's forward keeps for its backward, in the graph behind *result*."""
    waiting = [result.grad_fn]
    while waiting:
        node = waiting.pop(0)
        if node.name() == "CudnnRnnBackward0":
            return node._saved_result3.nbytes
        waiting += [before for before, _ in node.next_functions if before is not None]
    raise LookupError("no recurrent network of cuDNN")


def graph(device, num_graphs=1, shares_pool=False):
    """Captures forward and backward (twice, if asked), and replays: private memory, and not a byte more afterwards."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, device=device) for _ in range(4)))
    batch = torch.randn(64, 1024, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(batch).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graphs, kept = [], []
    for _ in range(num_graphs):
        model.zero_grad()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=graphs[0].pool() if shares_pool and graphs[:-1] else None):
            assert torch.cuda.is_current_stream_capturing()
            kept.append(model(batch).sum())
            kept[-1].backward()
        assert not torch.cuda.is_current_stream_capturing()
    pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()} - {(0, 0)}
    assert len(pools) == (1 if shares_pool else num_graphs), pools
    allocated = torch.cuda.memory_allocated()

    def step():
        batch.fill_(1.0)
        for captured in graphs:
            captured.replay()
        assert len(kept) == num_graphs
        assert all(weight.grad is not None for weight in model.parameters())
        assert torch.cuda.memory_allocated() == allocated

    return step


def graphed_callables(device):
    """make_graphed_callables: forward and backward are replayed by autograd."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).to(device)
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn(64, 512, device=device),))
    batch = torch.randn(64, 512, device=device)

    def step():
        graphed(batch).sum().backward()
        model.zero_grad()

    return step


def capture_reads_value(device):
    """A capture that waits for a value: CUDA forbids it."""

    def step():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.ones(1, device=device).item()

    return step


def side_stream(device, records):
    """64 MiB of the default stream, freed, and 64 MiB of another; with record_stream while that one may still use the first."""
    side = torch.cuda.Stream()

    def step():
        first = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
        if records:
            first.record_stream(side)
        del first
        active = torch.cuda.memory_stats()["active_bytes.all.current"]
        assert torch.cuda.memory_allocated() == 0
        assert active == (64 * MIB if records else 0), active
        with torch.cuda.stream(side):
            torch.empty(64 * MIB, dtype=torch.uint8, device=device)
        torch.empty(64 * MIB, dtype=torch.uint8, device=device)

    return step


def events(device):
    """Events order streams, are over when asked, and tell a time."""

    def step():
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        side = torch.cuda.Stream(priority=-1)
        start.record()
        with torch.cuda.stream(side):
            side.wait_event(start)
            torch.ones(8, device=device).sum()
            end.record()
        torch.cuda.current_stream().wait_event(end)
        end.synchronize()
        assert end.query()
        assert side.query()
        assert start.elapsed_time(end) > 0

    return step


def pinned(device):
    """Page-locked memory is told from other memory, goes to the device and comes back."""

    def step():
        batch = torch.arange(100.0).pin_memory()
        assert batch.is_pinned()
        assert not torch.arange(100.0).is_pinned()
        there = batch.to(device, non_blocking=True)
        back = torch.empty(100, pin_memory=True).copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        assert back.tolist() == batch.tolist()
        assert torch.cuda.memory_allocated() == 512  # 400 bytes, rounded up: nothing of the host's is counted
        own = torch.zeros(4096)
        assert torch.cuda.cudart().cudaHostRegister(own.data_ptr(), own.nbytes, 0) == 0
        assert own.is_pinned()
        assert torch.cuda.cudart().cudaHostUnregister(own.data_ptr()) == 0
        assert not own.is_pinned()

    return step


def odd_sizes(device):
    """What the allocator's settings act on: 1200 bytes, 1.2 MB, 30 MiB, and the last freed and asked for again in halves."""
    pin = torch.empty(1 << 20, pin_memory=True)

    def step():
        small, middle = (torch.empty(size, dtype=torch.uint8, device=device) for size in (1200, 1_200_000))
        large = torch.empty(30 * MIB, dtype=torch.uint8, device=device)
        del large
        halves = [torch.empty(15 * MIB, dtype=torch.uint8, device=device) for _ in range(2)]
        small.copy_(pin[:300].view(torch.uint8), non_blocking=True)
        del halves, middle

    return step


def attention(device, backend, dtype="float16", heads=8, sequence=1024, is_causal=True, is_trained=True):
    """Attention of a batch of 2 by one backend: heads of 64 values."""
    shape = 2, heads, sequence, 64
    inputs = [torch.randn(shape, device=device, dtype=getattr(torch, dtype), requires_grad=is_trained) for _ in range(3)]

    def step():
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            result = functional.scaled_dot_product_attention(*inputs, is_causal=is_causal)
        if is_trained:
            result.sum().backward()
            for tensor in inputs:
                tensor.grad = None

    return step


def convolution(device, is_channels_last=False, is_trained=True, dtype="float32", is_benchmarked=False):
    """One convolution of 8 images of 64 x 32 x 32 to 128 channels, with a kernel of 3 x 3 that keeps the size."""
    torch.backends.cudnn.benchmark = is_benchmarked
    layout = torch.channels_last if is_channels_last else torch.contiguous_format
    layer = nn.Conv2d(64, 128, 3, padding=1, bias=False).to(device, getattr(torch, dtype), memory_format=layout)
    batch = torch.randn(8, 64, 32, 32, device=device, dtype=getattr(torch, dtype)).contiguous(memory_format=layout)

    def step():
        with torch.set_grad_enabled(is_trained):
            result = layer(batch)
        if is_trained:
            result.backward(torch.ones_like(result))
            layer.zero_grad()

    return step


def wide_convolution(device):
    """A convolution of 40 images of 64 x 224 x 224 to as many channels, whose kernels are tried."""
    torch.backends.cudnn.benchmark = True
    layer = nn.Conv2d(64, 64, 3, padding=1, device=device)
    batch = torch.randn(40, 64, 224, 224, device=device, requires_grad=True)
    return lambda: layer(batch).relu().sum().backward()


def optimizer(device, name, **options):
    """A layer of 1024 x 1024 under an optimizer of torch.optim."""
    layer = nn.Linear(1024, 1024, bias=False, device=device)
    update = getattr(torch.optim, name)(layer.parameters(), **options)

    def step():
        def loss():
            update.zero_grad()
            found = layer(torch.randn(32, 1024, device=device)).square().mean()
            found.backward()
            return found

        update.step(loss)

    return step


def sparse_gradients(device):
    """An embedding whose gradient is sparse, under SparseAdam."""
    table = nn.Embedding(10_000, 64, sparse=True, device=device)
    update = torch.optim.SparseAdam(table.parameters())

    def step():
        table(torch.randint(0, 10_000, (512,), device=device)).sum().backward()
        update.step()
        update.zero_grad()

    return step


def tells(device, name, capability, multiprocessors, total_memory):
    """The GPU, as torch, the runtime and NVML see it."""

    def step():
        import pynvml

        properties = torch.cuda.get_device_properties(device)
        assert torch.cuda.device_count() == 1
        assert torch.cuda.get_device_name() == properties.name == name
        assert ".".join(map(str, torch.cuda.get_device_capability())) == capability
        assert properties.multi_processor_count == multiprocessors
        assert properties.total_memory == torch.cuda.mem_get_info()[1] == total_memory
        assert properties.warp_size == 32
        assert properties.max_threads_per_multi_processor in (1024, 1536, 2048)
        assert torch.cuda.is_bf16_supported(including_emulation=False) == (properties.major >= 8)
        held = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == 1
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(card)
        assert pynvml.nvmlDeviceGetName(card) == name
        assert pynvml.nvmlDeviceGetCudaComputeCapability(card) == (properties.major, properties.minor)
        assert (memory.free, memory.total) == torch.cuda.mem_get_info()
        assert memory.used == memory.total - memory.free >= held.numel()
        assert torch.cuda.device_memory_used() == memory.used
        pynvml.nvmlShutdown()

    return step


def monitors(device):
    """What loggers of a training ask NVML of a GPU's load."""

    def step():
        assert torch.cuda.utilization() == torch.cuda.memory_usage() == 0
        assert torch.cuda.temperature() >= 0
        assert torch.cuda.power_draw() >= 0
        assert torch.cuda.clock_rate() >= 0

    return step


def takes(device, sizes, gives_back=False, lets_go=False):
    """Takes blocks of *sizes* bytes and holds them; or lets go of each, which the allocator keeps; or gives each back to the GPU."""
    held = []

    def step():
        for size in sizes:
            held.append(torch.empty(size, dtype=torch.uint8, device=device))
            if gives_back or lets_go:
                held.clear()
            if gives_back:
                torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        assert free == total - torch.cuda.memory_reserved() - context_bytes(), (free, total)
        held.clear()

    return step


def context_bytes():
    """What the GPU's description says that the context takes."""
    return int(os.environ["MEMPLAN_CARD"].split()[5])


def survives(device):
    """Asks for more than there is, catches that, and goes on with less."""

    def step():
        for _ in range(3):
            try:
                torch.empty(1 << 40, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                gc.collect()
        torch.empty(MIB, dtype=torch.uint8, device=device)

    return step


class _Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((16,), float(index))


def loads(device, start="fork", workers=2):
    """Processes load the data, a thread pins it."""
    layer = nn.Linear(16, 16, device=device)

    def step():
        batches = torch.utils.data.DataLoader(
            _Numbers(), batch_size=16, num_workers=workers, pin_memory=True, multiprocessing_context=start
        )
        seen = 0
        for batch in batches:
            assert batch.is_pinned()
            seen += len(batch)
            layer(batch.to(device, non_blocking=True)).sum().backward()
        assert seen == 64

    return step


def forks(device):
    """A child that is forked off writes to the host's memory and leaves; it does not touch the GPU."""

    def step():
        torch.ones(8, device=device)
        child = os.fork()
        if child == 0:
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3

    return step


def threads(device):
    """Eight threads that allocate, free and copy on streams of their own."""

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                (torch.randn(1000, device=device, requires_grad=True) * 2).sum().backward()
                torch.tensor([1.0, 2.0]).to(device).cpu()

    def step():
        running = [threading.Thread(target=work) for _ in range(8)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    return step


def learns_later(device, first=2):
    """Of two layers the second takes part from the step *first* on."""
    model = nn.ModuleDict({"early": nn.Linear(64, 64, bias=False), "late": nn.Linear(64, 64, bias=False)}).to(device)
    update = torch.optim.SGD(model.parameters())
    steps = []

    def step():
        steps.append(None)
        found = model["early"](torch.randn(8, 64, device=device))
        if len(steps) >= first:
            found = model["late"](found)
        found.sum().backward()
        update.step()
        update.zero_grad()

    return step


def mlp(device, is_compiled):
    """Normalisation, bias and activation of 16,384 rows: what Inductor puts together."""
    torch._inductor.config.compile_threads = 1  # in this process: others would have to load PyTorch first
    layers = [nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)]
    model = nn.Sequential(*layers).to(device)
    forward = torch.compile(model) if is_compiled else model

    def step():
        forward(torch.randn(16_384, 256, device=device)).sum().backward()
        model.zero_grad()

    return step


def eight_bits(device):
    """bitsandbytes' AdamW, whose moments are bytes."""
    import bitsandbytes

    layer = nn.Linear(1024, 1024, bias=False, device=device)
    update = bitsandbytes.optim.AdamW8bit(layer.parameters())

    def step():
        layer(torch.randn(32, 1024, device=device)).square().mean().backward()
        update.step()
        update.zero_grad()

    return step
