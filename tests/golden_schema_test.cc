// The compiled schemas are those of tests/golden/schema.txt: every struct, field, enumerant, interface and method, with
// what decides its place in a message. Additions are allowed, with the next free number; all else would break clients
// and daemons of earlier releases (docs/api.md, "Changing the schema").
#include <capnp/schema-parser.h>
#include <kj/filesystem.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "tests/golden.h"
#include "tests/harness.h"

namespace kvmanager::testing {
namespace {

using capnp::schema::Type;

std::string Text(const kj::StringPtr& text) { return std::string(text.begin(), text.end()); }
std::string Text(const kj::String& text) { return std::string(text.begin(), text.end()); }

/// "kvmanager.capnp:Status" of ".../kvmanager.capnp:Status".
std::string NameOf(const capnp::Schema& schema) {
  const std::string name = Text(schema.getProto().getDisplayName());
  return name.substr(name.rfind('/') + 1);
}

std::string TypeName(const capnp::Type& type) {
  switch (type.which()) {
    case Type::LIST:
      return absl::StrCat("List(", TypeName(type.asList().getElementType()), ")");
    case Type::STRUCT:
      return NameOf(type.asStruct());
    case Type::ENUM:
      return NameOf(type.asEnum());
    case Type::INTERFACE:
      return NameOf(type.asInterface());
    default: {
      static constexpr const char* kNames[] = {"Void",   "Bool",   "Int8",   "Int16",   "Int32",   "Int64", "UInt8",
                                               "UInt16", "UInt32", "UInt64", "Float32", "Float64", "Text",  "Data"};
      const auto which = static_cast<size_t>(type.which());
      return which < std::size(kNames) ? kNames[which] : "AnyPointer";
    }
  }
}

class Lister {
 public:
  void AddFile(const capnp::ParsedSchema& file) { AddNested(file); }
  std::vector<GoldenLine> Take() { return std::move(lines_); }

 private:
  void AddNested(const capnp::ParsedSchema& parent) {
    for (const capnp::ParsedSchema& each : parent.getAllNested()) {
      const auto proto = each.getProto();
      if (proto.isStruct()) AddStruct(each.asStruct());
      if (proto.isEnum()) AddEnum(each.asEnum());
      if (proto.isInterface()) AddInterface(each.asInterface());
      // apiMinor grows with every addition.
      if (proto.isConst() && NameOf(each) == "kvmanager.capnp:apiMajor") {
        lines_.push_back({NameOf(each), absl::StrCat(proto.getConst().getValue().getUint16())});
      }
      AddNested(each);
    }
  }
  void AddStruct(const capnp::StructSchema& schema) {
    for (const capnp::StructSchema::Field field : schema.getFields()) {
      const auto proto = field.getProto();
      std::string value = Text(proto.getName());
      if (proto.getDiscriminantValue() != capnp::schema::Field::NO_DISCRIMINANT) {
        absl::StrAppend(&value, " of the union, tag ", proto.getDiscriminantValue());
      }
      if (proto.isGroup()) {
        lines_.push_back({absl::StrCat(NameOf(schema), " group ", Text(proto.getName())), value});
        AddStruct(field.getType().asStruct());
        continue;
      }
      const auto slot = proto.getSlot();
      absl::StrAppend(&value, " :", TypeName(field.getType()), ", offset ", slot.getOffset());
      if (slot.getHadExplicitDefault()) {
        absl::StrAppend(&value, ", default ", Text(kj::str(slot.getDefaultValue())));
      }
      lines_.push_back({absl::StrCat(NameOf(schema), " @", proto.getOrdinal().getExplicit()), value});
    }
  }
  void AddEnum(const capnp::EnumSchema& schema) {
    for (const capnp::EnumSchema::Enumerant each : schema.getEnumerants()) {
      lines_.push_back({absl::StrCat(NameOf(schema), " @", each.getOrdinal()), Text(each.getProto().getName())});
    }
  }
  void AddInterface(const capnp::InterfaceSchema& schema) {
    std::string id = absl::StrCat("@0x", absl::Hex(schema.getProto().getId()));
    for (const capnp::InterfaceSchema base : schema.getSuperclasses()) absl::StrAppend(&id, " extends ", NameOf(base));
    lines_.push_back({absl::StrCat(NameOf(schema), " id"), id});
    for (const capnp::InterfaceSchema::Method method : schema.getMethods()) {
      const capnp::StructSchema from = method.getParamType(), to = method.getResultType();
      lines_.push_back(
          {absl::StrCat(NameOf(schema), " @", method.getOrdinal()),
           absl::StrCat(Text(method.getProto().getName()), " (", NameOf(from), ") -> (", NameOf(to), ")")});
      // Those that are written at the method belong to no scope.
      for (const capnp::StructSchema& each : {from, to}) {
        if (each.getProto().getScopeId() == 0) AddStruct(each);
      }
    }
  }

  std::vector<GoldenLine> lines_;
};

TEST(GoldenSchema, NothingWasRemovedRenumberedOrRetyped) {
  capnp::SchemaParser parser;
  const kj::Own<kj::Filesystem> files = kj::newDiskFilesystem();
  const kj::ReadableDirectory& root = files->getRoot();
  const kj::Path include = kj::Path::parse("usr/include");  // capnp/c++.capnp
  const kj::Own<const kj::ReadableDirectory> imports = root.openSubdir(include);
  const kj::ReadableDirectory* const search[] = {imports.get()};
  Lister lister;
  for (const char* const name : {"kvmanager.capnp", "hand_off.capnp"}) {
    const std::string path = DataPath(absl::StrCat("kvmanager/api/", name));
    lister.AddFile(parser.parseFromDirectory(root, files->getCurrentPath().evalNative(path), kj::arrayPtr(search, 1)));
  }
  const std::vector<GoldenLine> lines = lister.Take();
  ASSERT_GT(lines.size(), 300u);
  GoldenFile file;
  file.name = "schema";
  file.may_drop = false;
  file.about =
      "What the schemas in kvmanager/api compile to. A field: its struct and number, then its name, type, place and\n"
      "default. Lines are only added (docs/api.md, \"Changing the schema\"), with\n"
      "  bazel run --config=opt //tests:golden_schema_test -- --write_golden";
  file.advice =
      "A field, enumerant or method is never removed, renumbered, renamed or retyped, since clients and daemons of "
      "earlier releases have it: restore it in kvmanager/api, and add a new one with the next free number.";
  ExpectGolden(file, lines);
}

}  // namespace
}  // namespace kvmanager::testing

int main(int argc, char** argv) { return kvmanager::testing::GoldenMain(argc, argv); }
