"""Which modules speak of which operators: a trace imports those that it needs.

Those of ATen are without namespace. Written by ``python -m benchmarks.operator_index --write``.
"""

from __future__ import annotations

NAMES = {
    "activations": """
        _log_softmax _log_softmax_backward_data _masked_softmax _masked_softmax_backward
        _nested_tensor_softmax_with_shape _safe_softmax _softmax _softmax_backward_data
        gelu_backward glu_backward glu_backward_jvp glu_jvp hardswish_backward log_sigmoid_backward
        log_sigmoid_forward log_softmax.int mish_backward softmax.int
    """,
    "attention.choice": """
        _fused_sdp_choice
    """,
    "attention.dot_product": """
        _cudnn_attention_forward _scaled_dot_product_cudnn_attention
        _scaled_dot_product_cudnn_attention_backward scaled_dot_product_attention
    """,
    "attention.efficient": """
        _efficient_attention_backward _efficient_attention_forward
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    """,
    "attention.flash": """
        _flash_attention_backward _flash_attention_forward _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_backward
    """,
    "attention.flash_for_cpu": """
        _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_flash_attention_for_cpu_backward
    """,
    "attention.multi_head": """
        _native_multi_head_attention _transform_bias_rescale_qkv _transformer_encoder_layer_fwd
    """,
    "attention.values": """
        _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    """,
    "attention.varlen": """
        _efficient_attention_backward _efficient_attention_forward _flash_attention_backward
        _flash_attention_forward
    """,
    "checks": """
        _cdist_forward _convolution _fused_rms_norm _index_put_impl_ _native_batch_norm_legit
        _native_batch_norm_legit.no_stats addbmm addbmm_ addmm aminmax.out binary_cross_entropy bmm
        bucketize.Tensor clamp clamp_ complex complex.out constant_pad_nd convolution
        convolution_overrideable copy_ fill.Scalar fill_.Scalar full full_like gelu gelu_
        gelu_backward grid_sampler_2d grid_sampler_3d histc index_fill.int_Scalar
        index_fill_.int_Scalar index_put index_put_ index_select linalg_cross.out masked_scatter
        masked_scatter_ max min mm multinomial native_batch_norm native_group_norm
        native_layer_norm new_full nll_loss2d_forward nll_loss_forward ormqr put_ scalar_tensor
        smooth_l1_loss std.correction uniform_ var.correction
    """,
    "checks_of_values": """
        _ctc_loss _dirichlet_grad _embedding_bag _embedding_bag_forward_only _sample_dirichlet
        _standard_gamma bernoulli bernoulli_ binary_cross_entropy bincount binomial
        cross_entropy_loss embedding gather index.Tensor index_add index_add_ index_copy
        index_copy_ index_put_ index_reduce index_reduce_ index_select max_unpool2d max_unpool3d
        multi_margin_loss multilabel_margin_loss_forward multinomial nll_loss2d_forward
        nll_loss_forward normal poisson put_ scatter scatter_ scatter_add scatter_add_
        scatter_reduce scatter_reduce_ take
    """,
    "convolution.alone": """
        _slow_conv2d_backward.output_mask _slow_conv2d_forward cudnn_convolution
        cudnn_convolution_add_relu cudnn_convolution_relu cudnn_convolution_transpose
        slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d
        slow_conv_transpose3d
    """,
    "convolution.convolution": """
        _convolution _nnpack_spatial_convolution convolution convolution_backward
        convolution_backward_overrideable convolution_overrideable mkldnn_convolution
    """,
    "derivatives": """
        max median min nanmedian renorm
    """,
    "distributed.fully_shard": """
        _chunk_cat _chunk_cat.out split_with_sizes_copy.out
    """,
    "embedding": """
        _embedding_bag _embedding_bag_backward _embedding_bag_dense_backward
        _embedding_bag_forward_only _embedding_bag_per_sample_weights_backward
        embedding_dense_backward embedding_renorm embedding_renorm_
    """,
    "factories": """
        _assert_async _assert_async.msg _assert_tensor_metadata _debug_has_internal_overlap
        _efficientzerotensor _empty_affine_quantized _empty_per_channel_affine_quantized
        _foreach_copy_ _fused_moving_avg_obs_fq_helper _has_same_storage_numel _local_scalar_dense
        _make_per_channel_quantized_tensor _make_per_tensor_quantized_tensor _to_copy _unsafe_view
        _use_cudnn_ctc_loss _validate_compressed_sparse_indices _version arange bartlett_window
        bartlett_window.periodic bernoulli bernoulli_ blackman_window blackman_window.periodic cat
        clone combinations copy_ empty empty_like empty_strided eye
        fake_quantize_per_tensor_affine.tensor_qparams feature_alpha_dropout feature_alpha_dropout_
        feature_dropout feature_dropout_ fill_ from_file full full_like hamming_window
        hamming_window.periodic hamming_window.periodic_alpha hamming_window.periodic_alpha_beta
        hann_window hann_window.periodic is_pinned is_same_size is_set_to istft kaiser_window
        kaiser_window.beta kaiser_window.periodic lift_fresh linalg_matrix_power linalg_matrix_rank
        linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_float_out
        linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.atol_rtol_tensor_out
        linalg_matrix_rank.out linalg_matrix_rank.out_tol_tensor linalg_matrix_rank.tol_tensor
        linalg_pinv linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_float_out linalg_pinv.out
        linalg_pinv.out_rcond_tensor linalg_pinv.rcond_tensor linalg_vander linspace logspace
        nanquantile.scalar nanquantile.scalar_out new_empty new_empty_strided new_full new_ones
        new_zeros one_hot ones ones_like pad_sequence prims::device_put prims::empty
        prims::empty_strided prims::full prims::full_like prims::scalar_tensor quantile.scalar
        quantile.scalar_out quantize_per_channel quantize_per_tensor
        quantize_per_tensor.tensor_qparams quantize_per_tensor.tensors quantize_per_tensor_dynamic
        quantized_gru.data quantized_gru.input quantized_gru_cell quantized_lstm.data
        quantized_lstm.input quantized_lstm_cell quantized_rnn_relu_cell quantized_rnn_tanh_cell
        rand randint randn random_ randperm range resize_ resize_as_ scalar_tensor
        set_.source_Tensor stack stft stft.center sym_numel sym_size.int sym_storage_offset
        sym_stride.int tril_indices triu_indices vander zero_ zeros zeros_like
    """,
    "foreach": """
        _amp_foreach_non_finite_check_and_unscale_ _foreach_addcdiv.Tensor _foreach_addcdiv_.Tensor
        _foreach_addcmul.Tensor _foreach_addcmul_.Tensor _foreach_max _foreach_norm _foreach_powsum
        _fused_adagrad_ _fused_adam_.tensor_lr _fused_adamw_.tensor_lr _fused_sgd_
    """,
    "fourier": """
        _fft_c2c _fft_c2r _fft_r2c fft_fft fft_fft.out fft_fft2 fft_fft2.out fft_fftn fft_fftn.out
        fft_hfft fft_hfft.out fft_hfft2 fft_hfft2.out fft_hfftn fft_hfftn.out fft_ifft fft_ifft.out
        fft_ifft2 fft_ifft2.out fft_ifftn fft_ifftn.out fft_ihfft fft_ihfft.out fft_ihfft2
        fft_ihfft2.out fft_ihfftn fft_ihfftn.out fft_irfft fft_irfft.out fft_irfft2 fft_irfft2.out
        fft_irfftn fft_irfftn.out fft_rfft fft_rfft.out fft_rfft2 fft_rfft2.out fft_rfftn
        fft_rfftn.out
    """,
    "histograms": """
        _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors bincount
        histc histc.out histogram.bin_ct histogram.bins_tensor
    """,
    "indexing.advanced": """
        _index_put_impl_ _unsafe_index.Tensor _unsafe_index_put index index.Tensor index_put
        index_put_
    """,
    "indexing.masks": """
        masked_scatter masked_scatter_ masked_select masked_select.out nonzero nonzero.out
        nonzero_static
    """,
    "indexing.rearrange": """
        narrow_copy repeat_interleave repeat_interleave.Tensor roll tril tril_ triu triu_
    """,
    "indexing.rows": """
        gather index_add index_add_ index_copy index_copy_ index_reduce index_reduce_ index_select
        scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_
    """,
    "linear_algebra.cusolver": """
        _cholesky_solve_helper _linalg_eigh _linalg_svd cholesky cholesky_inverse geqrf
        linalg_cholesky_ex linalg_householder_product linalg_ldl_solve linalg_lu_factor_ex
        linalg_lu_solve linalg_qr linalg_solve_triangular ormqr triangular_solve
    """,
    "linear_algebra.distance": """
        _cdist_backward _cdist_forward _pdist_backward
    """,
    "linear_algebra.lapack": """
        _cholesky_solve_helper _linalg_eigh _linalg_eigvals _linalg_svd cholesky cholesky_inverse
        geqrf linalg_eig linalg_householder_product linalg_ldl_factor_ex linalg_lstsq linalg_qr
        linalg_solve_triangular ormqr
    """,
    "linear_algebra.lu": """
        _linalg_check_errors _linalg_det _linalg_slogdet _linalg_solve_ex linalg_inv_ex linalg_lu
        linalg_lu_solve lu_unpack
    """,
    "linear_algebra.work": """
        _cholesky_solve_helper _linalg_det _linalg_slogdet _linalg_solve_ex geqrf
        linalg_cholesky_ex linalg_householder_product linalg_inv_ex linalg_lu_factor_ex
        linalg_lu_solve linalg_qr linalg_solve_triangular
    """,
    "losses": """
        _ctc_loss _ctc_loss.Tensor _ctc_loss_backward _cudnn_ctc_loss binary_cross_entropy
        binary_cross_entropy_backward ctc_loss.IntList ctc_loss.Tensor huber_loss
        huber_loss_backward mse_loss mse_loss_backward multi_margin_loss multi_margin_loss_backward
        multilabel_margin_loss_backward multilabel_margin_loss_forward nll_loss2d_backward
        nll_loss2d_forward nll_loss_backward nll_loss_forward smooth_l1_loss
        smooth_l1_loss_backward
    """,
    "matmul.low_precision": """
        _convert_weight_to_int4pack _grouped_mm _int_mm _scaled_mm _scaled_mm.out
        _weight_int4pack_mm _weight_int8pack_mm addmm.dtype addmm.dtype_out baddbmm.dtype
        baddbmm.dtype_out bmm.dtype bmm.dtype_out mm.dtype mm.dtype_out
    """,
    "matmul.products": """
        _addmm_activation _compute_linear_combination _trilinear addbmm addbmm_ addmm addmm_ addmv
        addmv_ addr addr_ baddbmm baddbmm_ bmm dot linalg_matrix_exp mkldnn_linear mm mv vdot
    """,
    "nested": """
        _nested_from_padded _nested_tensor_from_mask _nested_tensor_from_mask_left_aligned
        _nested_tensor_from_tensor_list _nested_tensor_size _padded_dense_to_jagged_forward
        to_padded_tensor
    """,
    "normalization.batch_norm": """
        _batch_norm_with_update _batch_norm_with_update_functional _native_batch_norm_legit
        batch_norm_backward native_batch_norm native_batch_norm_backward
    """,
    "normalization.cudnn_batch_norm": """
        _batch_norm_impl_index cudnn_batch_norm cudnn_batch_norm_backward
    """,
    "normalization.group_norm": """
        group_norm native_group_norm native_group_norm_backward
    """,
    "normalization.layer_norm": """
        _fused_rms_norm _fused_rms_norm_backward _weight_norm_interface
        _weight_norm_interface_backward native_layer_norm native_layer_norm_backward renorm renorm_
        rms_norm
    """,
    "normalization.sync_batch_norm": """
        batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt
        batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_stats
        batch_norm_update_stats
    """,
    "quantization": """
        _fake_quantize_learnable_per_channel_affine
        _fake_quantize_learnable_per_channel_affine_backward
        _fake_quantize_learnable_per_tensor_affine
        _fake_quantize_learnable_per_tensor_affine_backward
        _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
        fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask
    """,
    "random": """
        _dirichlet_grad _philox_normal _philox_uniform _sample_dirichlet _standard_gamma_grad
        bernoulli_.Tensor binomial dropout multinomial multinomial.out native_dropout
        native_dropout_backward normal.Tensor_Tensor normal.Tensor_Tensor_out normal.Tensor_float
        normal.Tensor_float_out normal.float_Tensor normal.float_Tensor_out randperm
    """,
    "recurrent.cudnn": """
        _cudnn_init_dropout_state _cudnn_rnn _cudnn_rnn_backward _cudnn_rnn_flatten_weight
        _use_cudnn_rnn_flatten_weight
    """,
    "recurrent.layers": """
        _pack_padded_sequence _pack_padded_sequence_backward _pad_packed_sequence
        _thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell gru.data gru.input
        gru_cell lstm.data lstm.input lstm_cell rnn_relu.data rnn_relu.input rnn_tanh.data
        rnn_tanh.input
    """,
    "recurrent.onednn": """
        mkldnn_rnn_layer mkldnn_rnn_layer_backward
    """,
    "recurrent.values": """
        _cudnn_rnn _cudnn_rnn_backward _thnn_fused_gru_cell _thnn_fused_gru_cell_backward
        _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl
    """,
    "reduction.sums": """
        _aminmax _is_all_true _is_any_true _segment_reduce_backward all all.dim all.dims amax amin
        aminmax any any.dim any.dims argmax argmin count_nonzero count_nonzero.dim_IntList equal
        linalg_vector_norm max max.dim mean min min.dim nansum norm prod segment_reduce std
        std_mean sum trace var var_mean
    """,
    "resampling": """
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
        _adaptive_avg_pool3d_backward _grid_sampler_2d_cpu_fallback
        _grid_sampler_2d_cpu_fallback_backward _upsample_bicubic2d_aa
        _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
        _upsample_nearest_exact1d _upsample_nearest_exact1d_backward _upsample_nearest_exact2d
        _upsample_nearest_exact2d_backward _upsample_nearest_exact3d
        _upsample_nearest_exact3d_backward adaptive_max_pool2d adaptive_max_pool2d_backward
        adaptive_max_pool3d adaptive_max_pool3d_backward avg_pool2d avg_pool2d_backward avg_pool3d
        avg_pool3d_backward channel_shuffle col2im cudnn_affine_grid_generator
        cudnn_affine_grid_generator_backward cudnn_grid_sampler cudnn_grid_sampler_backward
        fractional_max_pool2d fractional_max_pool2d_backward fractional_max_pool3d
        fractional_max_pool3d_backward grid_sampler grid_sampler_2d_backward im2col max_pool1d
        max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices
        max_pool3d_with_indices_backward max_unpool2d max_unpool3d pixel_shuffle pixel_unshuffle
        reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward
        reflection_pad3d reflection_pad3d_backward replication_pad1d replication_pad1d_backward
        replication_pad2d replication_pad2d_backward replication_pad3d replication_pad3d_backward
        unfold_backward upsample_bicubic2d upsample_bicubic2d_backward upsample_bilinear2d
        upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward
        upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d
        upsample_nearest2d_backward upsample_nearest3d upsample_nearest3d_backward
        upsample_trilinear3d upsample_trilinear3d_backward
    """,
    "sorting.distinct": """
        _unique _unique2 isin.Scalar_Tensor isin.Tensor_Scalar isin.Tensor_Tensor
        isin.Tensor_Tensor_out unique_consecutive unique_dim unique_dim_consecutive
    """,
    "sorting.order": """
        _cummax_helper _cummin_helper _logcumsumexp bucketize cumprod cumprod_ cumsum cumsum_
        kthvalue median mode nanmedian searchsorted sort sort.stable topk
    """,
    "sparse.compressed": """
        _nnz _sparse_compressed_tensor_unsafe _sparse_compressed_tensor_with_dims
        _sparse_mm_reduce_impl _sparse_mm_reduce_impl_backward _to_copy _to_dense _to_sparse
        _to_sparse_bsc _to_sparse_bsr _to_sparse_csc _to_sparse_csr abs abs_ addmm alias angle asin
        asin_ asinh asinh_ atan atan_ atanh atanh_ ccol_indices ceil ceil_ clone col_indices
        conj_physical conj_physical_ copy_ crow_indices deg2rad deg2rad_ dense_dim detach empty
        empty_like erf erf_ erfinv erfinv_ expm1 expm1_ fill_ floor floor_ frac frac_ is_same_size
        isinf isnan isneginf isposinf log1p log1p_ mm mul.Tensor neg neg_ rad2deg rad2deg_ relu
        relu_ resize_as_sparse_ round round_ row_indices select sgn sgn_ sign sign_ signbit sin
        sin_ sinh sinh_ sparse_compressed_tensor sparse_compressed_tensor.comp_plain_value
        sparse_compressed_tensor.comp_plain_value_size sparse_dim sparse_mask sparse_sampled_addmm
        sqrt sqrt_ sum tan tan_ tanh tanh_ transpose trunc trunc_ values zero_
    """,
    "sparse.coo": """
        _coalesce _coalesced_ _dimI _dimV _indices _nnz _sparse_addmm _sparse_coo_tensor_with_dims
        _sparse_coo_tensor_with_dims_and_tensors _sparse_log_softmax
        _sparse_log_softmax_backward_data _sparse_mm _sparse_softmax _sparse_softmax_backward_data
        _sparse_sum _sparse_sum_backward _spdiags _to_copy _to_dense _to_sparse
        _to_sparse.sparse_dim _to_sparse_csr _values abs add add_ addmm alias asin asinh atan atanh
        bmm cat ceil clone copy_ copy_sparse_to_sparse_ deg2rad dense_dim detach div div_ empty
        empty_like erf erfinv expm1 floor frac is_coalesced isinf isnan isneginf isposinf log1p mm
        mul mul_ mv nan_to_num neg neg_ norm permute pow rad2deg relu round sgn sign signbit sin
        sinh sparse_coo_tensor sparse_dim sparse_mask sparse_resize_ sparse_resize_and_clear_ sqrt
        stack sub sub_ sum t tan tanh to_dense transpose transpose_ trunc unsqueeze zero_ zeros
        zeros_like
    """,
    "workspace_of": """
        _adaptive_avg_pool3d _conj_physical _convert_indices_from_coo_to_csr
        _convert_indices_from_csr_to_coo _ctc_loss _cudnn_init_dropout_state _cummax_helper
        _cummin_helper _dirichlet_grad _embedding_bag_per_sample_weights_backward
        _fake_quantize_per_tensor_affine_cachemask_tensor_qparams _fill_mem_eff_dropout_mask_
        _fused_dropout _jagged_to_padded_dense_forward _logcumsumexp _masked_scale
        _pack_padded_sequence_backward _pad_packed_sequence _pdist_backward _pdist_forward
        _philox_normal _philox_uniform _prelu_kernel _prelu_kernel_backward _sample_dirichlet
        _standard_gamma _standard_gamma_grad _thnn_fused_gru_cell _thnn_fused_lstm_cell
        _thnn_fused_lstm_cell_backward_impl _to_copy _transform_bias_rescale_qkv _unsafe_view
        _weight_norm_interface _weight_norm_interface_backward adaptive_max_pool3d addcdiv addcmul
        addr alias_copy arange as_strided_scatter bernoulli binary_cross_entropy_backward binomial
        cat cauchy channel_shuffle clone complex constant_pad_nd copy diag_embed diagonal_backward
        diagonal_scatter elu_backward embedding empty_like expand_copy exponential eye
        fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask fill
        flip floor_divide fractional_max_pool3d_backward full_like gather gelu gelu_backward
        geometric glu glu_backward glu_jvp grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d
        grid_sampler_3d_backward hardshrink_backward hardsigmoid_backward hardswish
        hardswish_backward hardtanh_backward hash_tensor heaviside huber_loss_backward index_copy
        index_fill index_fill_ index_select leaky_relu_backward lerp lift lift_fresh
        linalg_cholesky_ex linalg_cross linalg_lu_factor_ex linspace log_normal
        log_sigmoid_backward log_sigmoid_forward logit_backward logspace masked_fill mish
        mish_backward mode mse_loss_backward narrow_copy native_channel_shuffle native_dropout
        native_dropout_backward new_empty new_empty_strided new_full new_ones new_zeros nonzero
        norm normal normal_ ones_like permute_copy pixel_shuffle pixel_unshuffle poisson polar put
        rand_like randint_like randn_like random range reflection_pad3d_backward repeat
        replication_pad1d replication_pad1d_backward replication_pad2d replication_pad2d_backward
        replication_pad3d replication_pad3d_backward resize rrelu_with_noise rsub select_backward
        select_copy select_scatter set_ sigmoid_backward silu_backward slice_backward slice_copy
        slice_scatter smooth_l1_loss_backward softplus_backward softshrink_backward stack std_mean
        take tanh_backward threshold_backward topk trace triangular_solve tril triu uniform
        upsample_bicubic2d upsample_linear1d upsample_trilinear3d
        value_selecting_reduction_backward var_mean view_copy zero zeros_like
    """,
}
#: Operators that have a path on cuda.
CUDA_PATHS = """
    _batch_norm_impl_index _cudnn_rnn_flatten_weight _fused_rms_norm _fused_sdp_choice
    _native_multi_head_attention _pad_packed_sequence _transformer_encoder_layer_fwd
    _use_cudnn_rnn_flatten_weight combinations ctc_loss.IntList ctc_loss.Tensor dropout
    fake_quantize_per_tensor_affine.tensor_qparams feature_alpha_dropout feature_alpha_dropout_
    feature_dropout feature_dropout_ fft_fft fft_fft.out fft_fft2 fft_fft2.out fft_fftn
    fft_fftn.out fft_hfft fft_hfft.out fft_hfft2 fft_hfft2.out fft_hfftn fft_hfftn.out fft_ifft
    fft_ifft.out fft_ifft2 fft_ifft2.out fft_ifftn fft_ifftn.out fft_ihfft fft_ihfft.out fft_ihfft2
    fft_ihfft2.out fft_ihfftn fft_ihfftn.out fft_irfft fft_irfft.out fft_irfft2 fft_irfft2.out
    fft_irfftn fft_irfftn.out fft_rfft fft_rfft.out fft_rfft2 fft_rfft2.out fft_rfftn fft_rfftn.out
    grid_sampler group_norm gru.data gru.input gru_cell istft linalg_matrix_power
    linalg_matrix_rank linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_float_out
    linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.atol_rtol_tensor_out
    linalg_matrix_rank.out linalg_matrix_rank.out_tol_tensor linalg_matrix_rank.tol_tensor
    linalg_pinv linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_float_out linalg_pinv.out
    linalg_pinv.out_rcond_tensor linalg_pinv.rcond_tensor linalg_vander log_softmax.int lstm.data
    lstm.input lstm_cell max max_pool1d median min nanmedian nanquantile.scalar
    nanquantile.scalar_out one_hot pad_sequence quantile.scalar quantile.scalar_out renorm rms_norm
    rnn_relu.data rnn_relu.input rnn_tanh.data rnn_tanh.input scaled_dot_product_attention
    softmax.int stft stft.center vander
"""
