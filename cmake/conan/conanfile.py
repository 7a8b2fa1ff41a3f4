# conan create cmake/conan: the headers of the tree that this file lies in.
import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.files import copy, load


class AttnConan(ConanFile):
    name = "attn"
    license = "MIT"
    description = "Attention operators for CPUs, as C++20 headers"
    package_type = "header-library"
    settings = "os", "compiler", "build_type", "arch"
    requires = "eigen/[>=3.4]", "xsimd/[>=8.1]"
    no_copy_source = True

    def _root(self):
        return os.path.join(self.recipe_folder, "..", "..")

    def set_version(self):
        header = load(self, os.path.join(self._root(), "include", "attn", "version.hpp"))
        self.version = ".".join(re.search(rf"ATTN_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))

    def export_sources(self):
        for pattern in ("include/*", "LICENSE"):
            copy(self, pattern, self._root(), self.export_sources_folder)

    def validate(self):
        check_min_cppstd(self, 20)

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        copy(self, "include/*.hpp", self.source_folder, self.package_folder)

    def package_id(self):
        self.info.clear()

    def package_info(self):
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        if self.settings.os in ("Linux", "FreeBSD"):
            self.cpp_info.system_libs = ["pthread"]
